"""Whether a state that is to be saved holds a NaN or Inf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from nanscan import engine, paddle_objects
from nanscan.checkpoint.tensors import Found
from nanscan.engine.result import BadInput
from nanscan.engine.tensors import resolve
from nanscan.errors import NonFiniteError
from nanscan.report import Report, TensorReport
from nanscan.scanning import scan

__all__ = ["MODES", "check_finite_state", "nan_in"]

MODES: tuple[Any, ...] = (True, False, "nan")
_PLAIN = frozenset({Tensor, nn.Parameter})
_RUNNING = (
    "Only running statistics are bad: the forward pass of a bad batch spoils them although its step is skipped. "
    "nanscan.Recovery puts them back; or call reset_running_stats() on these modules. A file that was there is "
    "untouched."
)


def check_finite_state(found: Sequence[Found], path: str, mode: bool | str) -> None:
    """Refuse a state with a NaN (or Inf) in a floating-point or complex tensor.

    Args:
        found: the tensors of the state.
        path: the file that would be written, for the message.
        mode: True refuses NaN and Inf, "nan" NaN only, False nothing.

    Raises:
        NonFiniteError: with every bad tensor in ``.report``.
    """
    if mode is False or _all_finite(found):
        return
    report, bad = _bad(found, mode)
    if not bad:
        return
    listed = _listed(bad)
    inf = "" if mode == "nan" else ', or check_finite="nan" if the Inf is meant (masks)'
    only_running = all(_is_running(row.name) for row in bad)
    way_out = _RUNNING if only_running else "A file that was there is untouched; go back to it."
    raise NonFiniteError(
        f"not saved to {path!r}: {listed}. {way_out} To save this state nevertheless, give check_finite=False{inf}.",
        report,
    )


def nan_in(found: Sequence[Found]) -> str:
    """The tensors that hold a NaN, a few words each; "" if none does."""
    return "" if _all_finite(found) else _listed(_bad(found, "nan")[1])


def _bad(found: Sequence[Found], mode: bool | str) -> tuple[Report, list[TensorReport]]:
    report = _scan({item.label: item.tensor for item in found if _may_hold_nan(item.tensor)})
    return report, [row for row in report.bad if row.nan_count or mode is True] if not report.finite else []


def _listed(bad: Sequence[TensorReport]) -> str:
    return "; ".join(row.describe() for row in bad[:5]) + (f"; and {len(bad) - 5} more" if len(bad) > 5 else "")


def _is_running(name: str) -> bool:
    """True for the statistics of a BatchNorm, by its name in a state: `model["1.running_mean"]`."""
    return name.rstrip("\"]'").endswith(("running_mean", "running_var"))


def _all_finite(found: Sequence[Found]) -> bool:
    """True if a scan without names, which most states need no more than, finds nothing bad."""
    tensors = [item.tensor for item in found]
    if not all(type(tensor) in _PLAIN for tensor in tensors):
        return False
    try:
        return engine.scan([tensor for tensor in tensors if _may_hold_nan(tensor)]).finite
    except (BadInput, ValueError):
        return False


def _may_hold_nan(tensor: Tensor) -> bool:
    if type(tensor) not in _PLAIN and paddle_objects.is_tensor(tensor):
        return paddle_objects.holds_floats(tensor)
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta


def _scan(floats: dict[str, Tensor]) -> Report:
    try:
        return scan(floats)
    except (TypeError, ValueError):  # one that has no numbers, or in a dtype that can't be read
        return scan({name: tensor for name, tensor in floats.items() if _is_readable(tensor)})


def _is_readable(tensor: Tensor) -> bool:
    try:
        resolve(paddle_objects.as_torch(tensor) if paddle_objects.is_tensor(tensor) else tensor)
    except (BadInput, ValueError):
        return False
    return True
