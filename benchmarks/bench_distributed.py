"""What the guard adds to a step on DTensors over two and four processes, and how many collectives that takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import pytest

from benchmarks.conftest import Figures
from benchmarks.ranks_step import SHAPE, TENSORS
from benchmarks.replay import CLOCK, record
from nanscan.bench.table import print_table, show_time
from tests.ranks import Ranks

COMMANDS = (
    "plain step",
    "guarded step",
    "torch clip + step",
    "torch clip_grad_norm_",
    "nanscan clip_grad_norm_",
    "all_reduce, the guard's",  # the few numbers of a good step, next to telling all of a finding
    "all_gather of 152 bytes",
)
ROUNDS = 100


@dataclass(frozen=True)
class DistributedRow:
    """Of one command with so many processes: seconds on rank 0, and collectives counted by the profiler."""

    processes: int
    command: str
    seconds: float
    fastest: float
    collectives: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@cache
def measured(processes: int) -> dict[str, Any]:
    ranks = Ranks(processes, "benchmarks.ranks_step")
    try:
        return dict(ranks.run("measured", ROUNDS)[0])
    finally:
        ranks.close()


@pytest.mark.benchmark(timer=CLOCK.now)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("processes", [2, 4])
def test_distributed(benchmark, figures: Figures, processes: int, command: str) -> None:
    samples, collectives = measured(processes)[command]
    benchmark.group = f"distributed {processes} processes"
    record(benchmark, samples, processes=processes, command=command)
    row = DistributedRow(processes, command, statistics.median(samples), min(samples), collectives)
    figures.add("distributed", row, print_distributed)


def print_distributed(rows: Sequence[DistributedRow]) -> None:
    plain = {row.processes: row.seconds for row in rows if row.command == "plain step"}
    print_table(
        f"A step on {TENSORS} DTensors of {SHAPE[0]} × {SHAPE[1]} float32 (gloo, one thread each)",
        ("command", "processes", "median", "fastest", "added to a plain step", "collectives"),
        [[row.command, str(row.processes), *times(row), _added(row, plain), str(row.collectives)] for row in rows],
        "more processes than cores wait for each other; the norm is read by the host in all of them",
    )


def times(row: DistributedRow) -> tuple[str, str]:
    """Median and fastest, to be read."""
    return show_time(row.seconds), show_time(row.fastest)


def _added(row: DistributedRow, plain: dict[int, float]) -> str:
    known = row.command in ("guarded step", "torch clip + step") and row.processes in plain
    return show_time(row.seconds - plain[row.processes]) if known else "–"
