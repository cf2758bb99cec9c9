"""The scan suite: what one scan of the gradients costs, next to the loop, foreach, the scaler's check, a flat read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nanscan.bench.goals import cell, goals_for
from nanscan.bench.gradients import make_gradients
from nanscan.bench.peers import FLAT_READS, check_commands
from nanscan.bench.shapes import Workload, workload
from nanscan.bench.table import print_table, show_bytes, show_time
from nanscan.bench.timing import Plan, Timings, interleave

__all__ = ["ScanRow", "measure_scan", "print_scan_rows"]


@dataclass(frozen=True)
class ScanRow:
    """The figures of one workload in one dtype; times in seconds, medians of one interleaved run.

    ``limit`` is the time of the fastest flat read over ours: 1.0 is memory speed.
    """

    row: str
    dtype: str
    tensors: int
    nbytes: int
    rounds: int
    medians: dict[str, float]
    flat_read: float
    loop: float
    foreach: float
    scaler: float
    limit: float
    timings: Timings = field(repr=False, compare=False)

    def verdicts(self) -> dict[str, str]:
        """One of "ok" and "short" for each figure that has a goal."""
        goals = goals_for(self.row, self.dtype)
        return {name: goal.verdict(float(getattr(self, name))) for name, goal in goals.items()}

    def to_dict(self) -> dict[str, Any]:
        names = ("row", "dtype", "tensors", "nbytes", "rounds", "medians", "flat_read")
        ratios = ("loop", "foreach", "scaler", "limit")
        goals = {name: str(goal) for name, goal in goals_for(self.row, self.dtype).items()}
        return {name: getattr(self, name) for name in names + ratios} | {"goals": goals, "verdicts": self.verdicts()}


def measure_scan(row: Workload, dtype: torch.dtype = torch.float32, plan: Plan | None = None) -> ScanRow:
    """Time one scan and its peers on one workload.

    Args:
        row: the shapes.
        dtype: of the gradients: float32, bfloat16 or float16.
        plan: how long to measure.

    Example:
        >>> from nanscan.bench.shapes import workload
        >>> measure_scan(workload("mlp"), plan=Plan(seconds=0.05)).tensors
        16
    """
    made = make_gradients(row.shapes, dtype)
    timings = interleave(check_commands(made), plan)
    flat_read = timings.fastest(*FLAT_READS)
    ours = timings.median("ours")
    return ScanRow(
        row=row.name,
        dtype=str(dtype).removeprefix("torch."),
        tensors=row.tensors,
        nbytes=made.nbytes,
        rounds=timings.rounds,
        medians=timings.medians(),
        flat_read=flat_read,
        loop=timings.ratio("loop", "ours"),
        foreach=timings.ratio("foreach", "ours"),
        scaler=timings.ratio("scaler", "ours"),
        limit=flat_read / ours,
        timings=timings,
    )


def print_scan_rows(rows: Sequence[ScanRow]) -> None:
    """Print the table of ratios of medians."""
    columns = ("row", "dtype", "tensors", "bytes", "ours", "GB/s", "loop ÷ ours", "foreach ÷ ours", "scaler ÷ ours")
    print_table(
        "One scan of the gradients",
        (*columns, "of the read limit"),
        [_cells(row) for row in rows],
        "medians of one run, commands interleaved in random order; read limit: the fastest of torch.sum and torch.dot "
        "over one flat buffer of the same bytes",
    )


def _cells(row: ScanRow) -> list[str]:
    goals = goals_for(row.row, row.dtype)
    ours = row.medians["ours"]
    return [
        workload(row.row).title,
        row.dtype,
        str(row.tensors),
        show_bytes(row.nbytes),
        show_time(ours),
        f"{row.nbytes / ours / 1e9:.1f}",
        cell(row.loop, goals["loop"], 1),
        cell(row.foreach, goals["foreach"]),
        cell(row.scaler, goals["scaler"]),
        cell(row.limit, goals.get("limit")),
    ]
