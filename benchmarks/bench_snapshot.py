"""A snapshot for rollback, its finite check included, against one plain copy of the same state into memory at hand."""

from __future__ import annotations

import warnings
from functools import cache, partial

import pytest

import nanscan
from benchmarks.conftest import Figures
from benchmarks.replay import CLOCK, record
from benchmarks.trained import LARGE, StateRow, print_states, tensors_of, trained
from nanscan.bench import Plan, interleave
from nanscan.bench.goals import Goal
from nanscan.recovery.memory import Moment

GOAL = Goal(at_most=1.2)
TITLE = "snapshot: weights and AdamW's state; ratio = snapshot / copy"
SHAPES = {
    "8 layers of 1024": [(1024, 1024), (1024,)] * 8,
    **LARGE,
    "2,000 small": [(64,), (32, 32)] * 1000,
}


@cache
def measured(row: str, plan: Plan) -> StateRow:
    model, optimizer = trained(SHAPES[row])
    recovery = nanscan.Recovery(model, optimizer)
    memory = recovery._memory
    memory.take(Moment(0))  # the second copy's memory
    live = tensors_of(model, optimizer)
    targets = [t.clone() for t in live]

    def copy() -> None:
        for source, target in zip(live, targets, strict=True):
            target.copy_(source)

    commands = {"copy": copy, "clone": lambda: [t.clone() for t in live], "snapshot": lambda: memory.take(Moment(0))}
    timings = interleave(commands, plan)
    return StateRow.of(row, live, timings, timings.ratio("snapshot", "copy"), GOAL)


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
        figures.add("snapshot", result, partial(print_states, TITLE))
