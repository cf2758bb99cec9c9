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
from nanscan.report import Report
from nanscan.scanning import scan

__all__ = ["MODES", "check_finite_state"]

MODES: tuple[Any, ...] = (True, False, "nan")
_PLAIN = frozenset({Tensor, nn.Parameter})


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
    floats = {item.label: item.tensor for item in found if _may_hold_nan(item.tensor)}
    report = _scan(floats)
    bad = [row for row in report.bad if row.nan_count or mode is True] if not report.finite else []
    if not bad:
        return
    listed = "; ".join(row.describe() for row in bad[:5]) + (f"; and {len(bad) - 5} more" if len(bad) > 5 else "")
    inf = "" if mode == "nan" else ', or check_finite="nan" if the Inf is meant (masks)'
    raise NonFiniteError(
        f"not saved to {path!r}: {listed}. A file that was there is untouched; go back to it. To save this state "
        f"nevertheless, give check_finite=False{inf}.",
        report,
    )


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
