"""A snapshot for rollback, its finite check included, against one plain copy of the same state into memory at hand."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import pytest
from torch import Tensor

import nanscan
from benchmarks.conftest import Figures
from benchmarks.replay import CLOCK, record
from benchmarks.trained import LARGE, trained
from nanscan.bench import Plan, Timings, interleave
from nanscan.bench.goals import Goal
from nanscan.bench.table import print_table, show_time
from nanscan.recovery.memory import Moment
from nanscan.recovery.training_state import TrainingState

GOAL = Goal(at_most=1.2)
SHAPES = {
    "8 layers of 1024": [(1024, 1024), (1024,)] * 8,
    **LARGE,
    "2,000 small": [(64,), (32, 32)] * 1000,
}


@dataclass(frozen=True)
class SnapshotRow:
    """Seconds of a snapshot and of the copies it is compared with; `ratio` is snapshot / copy."""

    row: str
    tensors: int
    megabytes: float
    rounds: int
    medians: dict[str, float]
    ratio: float
    timings: Timings = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in asdict(self).items() if name != "timings"}
        return plain | {"goal": str(GOAL), "verdict": GOAL.verdict(self.ratio)}


@cache
def measured(row: str, plan: Plan) -> SnapshotRow:
    model, optimizer = trained(SHAPES[row])
    recovery = nanscan.Recovery(model, optimizer)
    memory = recovery._memory
    memory.take(Moment(0))  # the second copy's memory
    live = [t for _, _, t in TrainingState(model, optimizer).parameters()]
    live += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    live = [t.detach() for t in live]
    targets = [t.clone() for t in live]

    def copy() -> None:
        for source, target in zip(live, targets, strict=True):
            target.copy_(source)

    commands = {"copy": copy, "clone": lambda: [t.clone() for t in live], "snapshot": lambda: memory.take(Moment(0))}
    timings = interleave(commands, plan)
    medians = {name: timings.median(name) for name in commands}
    size = sum(t.numel() * t.element_size() for t in live) / 1e6
    return SnapshotRow(row, len(live), size, timings.rounds, medians, timings.ratio("snapshot", "copy"), timings)


def print_rows(rows: Sequence[SnapshotRow]) -> None:
    """The table of this suite."""
    print_table(
        f"snapshot: weights and AdamW's state; ratio = snapshot / copy, goal {GOAL}",
        ["row", "tensors", "MB", "copy", "clone", "snapshot", "ratio", "goal"],
        [
            [
                r.row,
                str(r.tensors),
                f"{r.megabytes:.0f}",
                *(show_time(r.medians[name]) for name in ("copy", "clone", "snapshot")),
                f"{r.ratio:.2f}",
                GOAL.verdict(r.ratio),
            ]
            for r in rows
        ],
    )


@pytest.mark.benchmark(timer=CLOCK.now)
@pytest.mark.parametrize("command", ["copy", "clone", "snapshot"])
@pytest.mark.parametrize("row", SHAPES)
def test_snapshot(benchmark, figures: Figures, plan: Plan, row: str, command: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", nanscan.NonFiniteWarning)
        result = measured(row, plan)
    benchmark.group = f"snapshot {row}"
    record(benchmark, result.timings.samples[command], row=row, command=command)
    if command == "snapshot":
        figures.add("snapshot", result, print_rows)
