"""What reading the list of gradients costs: alone, and as a scan of one-element gradients from end to end."""

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
from nanscan.bench.table import print_table
from nanscan.bench.timing import Command
from nanscan.engine.native import NativeEngine

COUNTS = (100, 1000, 10_000)


@dataclass(frozen=True)
class GatherRow:
    """Nanoseconds per tensor: of the reading alone (native engine only), of a whole scan, of a list comprehension."""

    tensors: int
    per_tensor: float | None
    scan: float
    python_list: float

    def to_dict(self) -> dict[str, Any]:
        verdict = None if self.per_tensor is None else GATHER.verdict(self.per_tensor)
        return asdict(self) | {"goal": str(GATHER), "verdict": verdict}


@cache
def measured(count: int, plan: Plan) -> Timings:
    made = make_gradients([(1,)] * count)
    groups, parameters = made.param_groups, made.parameters
    commands: dict[str, Command] = {
        "scan": lambda: engine.scan_grads(groups).finite,
        "python list": lambda: [p.grad for p in parameters],
    }
    native = engine.active_engine()
    if isinstance(native, NativeEngine):
        commands["read the list"] = lambda: native.read_list(groups)
    return interleave(commands, plan)


@pytest.mark.benchmark(timer=CLOCK.now)
@pytest.mark.parametrize("command", ["scan", "python list"])
@pytest.mark.parametrize("count", COUNTS)
def test_gather(benchmark, figures: Figures, plan: Plan, count: int, command: str) -> None:
    timings = measured(count, plan)
    benchmark.group = f"gather {count} tensors"
    record(benchmark, timings.samples[command], tensors=count, command=command)
    if command == "scan":
        each = {name: timings.median(name) / count * 1e9 for name in timings.samples}
        row = GatherRow(count, each.get("read the list"), each["scan"], each["python list"])
        figures.add("gather", row, print_gather)


def _read(per_tensor: float | None) -> str:
    return "–" if per_tensor is None else cell(per_tensor, GATHER, 1)


def print_gather(rows: Sequence[GatherRow]) -> None:
    print_table(
        "Reading the list of gradients",
        ("tensors of one element", "reading the list, ns each", "a whole scan, ns each", "a Python list, ns each"),
        [[f"{row.tensors:,}", _read(row.per_tensor), f"{row.scan:.1f}", f"{row.python_list:.1f}"] for row in rows],
        "a whole scan: reading the list, one element and one result row per tensor",
    )
