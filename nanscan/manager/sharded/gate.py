"""Before a shard is written: is the state of all ranks finite? One answer, the same error on each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanscan import engine
from nanscan.checkpoint.finite import check_finite_state
from nanscan.checkpoint.tensors import tensors_in
from nanscan.engine.shards import is_dtensor, logical_index
from nanscan.engine.tensors import resolve
from nanscan.errors import NonFiniteError
from nanscan.report import Report, TensorReport

__all__ = ["bad_rows", "refuse"]


def bad_rows(state: Mapping[str, Any], path: str, mode: Any, rank: int) -> tuple[TensorReport, ...]:
    """A row for each tensor of this rank's state that must not be saved, with its index in the whole tensor.

    Args:
        state: a checkpoint's dict.
        path: where it would go.
        mode: `check_finite` of the manager.
        rank: this process, for the rows.
    """
    found = tensors_in(state)
    try:
        check_finite_state(found, path, mode)
    except NonFiniteError as error:
        assert error.report is not None
        sharded = {item.label: item.tensor for item in found if is_dtensor(item.tensor)}
        rows = [row for row in error.report.bad if row.nan_count or mode is True]
        return tuple(replace(row, rank=rank, first_bad=_place(row, sharded)) for row in rows)
    return ()


def _place(row: TensorReport, sharded: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The index in the whole tensor; the scan counts within the shard."""
    tensor = sharded.get(row.name.split(" (= ")[0])  # of a tied one, the first name
    if tensor is None:
        return row.first_bad
    first = engine.scan([resolve(tensor)]).bad_rows()[0].first_bad
    return logical_index(tensor, first)


def refuse(found: Sequence[tuple[TensorReport, ...]], path: str, mode: Any) -> None:
    """Raise if a rank found something; the same on all.

    Args:
        found: `bad_rows` of each rank.
        path: where it would go.
        mode: `check_finite` of the manager.
    """
    rows = _merged(found)
    if not rows:
        return
    listed = "; ".join(row.describe() for row in rows[:5]) + (f"; and {len(rows) - 5} more" if len(rows) > 5 else "")
    inf = "" if mode == "nan" else ', or check_finite="nan" if the Inf is meant (masks)'
    raise NonFiniteError(
        f"not saved to {path!r}, on no rank: {listed}. Older checkpoints are untouched; go back to one. To save this "
        f"state nevertheless, give check_finite=False{inf}.",
        _report(rows),
    )


def _merged(found: Sequence[tuple[TensorReport, ...]]) -> tuple[TensorReport, ...]:
    """What all ranks say alike is said once, without a rank."""
    plain = [{repr(replace(row, rank=None)) for row in rows} for rows in found]
    everywhere = set.intersection(*plain) if len(found) > 1 else set()
    merged: dict[str, TensorReport] = {}
    for rows in found:
        for row in rows:
            alone = replace(row, rank=None)
            merged.setdefault(*((repr(alone), alone) if repr(alone) in everywhere else (repr(row), row)))
    return tuple(merged.values())


def _report(rows: tuple[TensorReport, ...]) -> Report:
    nan, inf = sum(row.nan_count for row in rows), sum(row.inf_count for row in rows)
    largest = max(row.inf_norm for row in rows)
    norm = math.nan if nan else math.inf
    return Report(False, norm, largest, largest, nan, inf, sum(row.numel for row in rows), rows, rows)
