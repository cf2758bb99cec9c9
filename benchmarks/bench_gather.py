"""What reading the list of gradients costs: scans of gradients of one element, where there is nothing else to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import pytest

from benchmarks.conftest import Figures
from benchmarks.replay import CLOCK, record
from nanscan import engine
from nanscan.bench import Plan, Timings, interleave
from nanscan.bench.goals import GATHER, cell
from nanscan.bench.gradients import make_gradients
from nanscan.bench.table import print_table, show_time
from nanscan.bench.timing import Command

COUNTS = (100, 1000, 10_000)


@dataclass(frozen=True)
class GatherRow:
    """Nanoseconds per tensor of a whole scan of one-element gradients: an upper bound on reading the list."""

    tensors: int
    seconds: float
    per_tensor: float
    python_list: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"goal": str(GATHER), "verdict": GATHER.verdict(self.per_tensor)}


@cache
def measured(count: int, plan: Plan) -> Timings:
    made = make_gradients([(1,)] * count)
    groups, parameters = made.param_groups, made.parameters
    commands: dict[str, Command] = {
        "scan": lambda: engine.scan_grads(groups).finite,
        "python list": lambda: [p.grad for p in parameters],
    }
    return interleave(commands, plan)


@pytest.mark.benchmark(timer=CLOCK.now)
@pytest.mark.parametrize("command", ["scan", "python list"])
@pytest.mark.parametrize("count", COUNTS)
def test_gather(benchmark, figures: Figures, plan: Plan, count: int, command: str) -> None:
    timings = measured(count, plan)
    benchmark.group = f"gather {count} tensors"
    record(benchmark, timings.samples[command], tensors=count, command=command)
    if command == "scan":
        scan, listed = timings.median("scan"), timings.median("python list")
        figures.add("gather", GatherRow(count, scan, scan / count * 1e9, listed / count * 1e9), print_gather)


def print_gather(rows: Sequence[GatherRow]) -> None:
    print_table(
        "Reading the list of gradients",
        ("tensors of one element", "scan", "ns per tensor", "a Python list of them, ns per tensor"),
        [
            [f"{row.tensors:,}", show_time(row.seconds), cell(row.per_tensor, GATHER, 1), f"{row.python_list:.1f}"]
            for row in rows
        ],
        "a whole scan of one-element gradients: reading the list, one element and one result row per tensor",
    )
