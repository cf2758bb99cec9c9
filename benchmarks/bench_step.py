"""A guarded AdamW step against a bare one: unclipped (fused), and clipped (fused and foreach)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import pytest

from benchmarks.conftest import Figures
from benchmarks.peers import compiled_clip_and_step, stabilityguard_step
from benchmarks.replay import CLOCK, record
from nanscan.bench import WORKLOADS, Plan, workload
from nanscan.bench.step_rows import (
    ClippedRow,
    StepRow,
    measure_clipped,
    measure_step,
    print_clipped_rows,
    print_step_rows,
)


@cache
def unclipped(row: str, plan: Plan, with_stabilityguard: bool) -> StepRow:
    peers = {"stabilityguard": stabilityguard_step} if with_stabilityguard else {}
    return measure_step(workload(row), plan, peers)


@cache
def clipped(row: str, fused: bool, plan: Plan, compiled: bool) -> ClippedRow:
    peers = {"torch.compile": compiled_clip_and_step} if compiled else {}
    often = replace(
        plan, min_rounds=3 * plan.min_rounds
    )  # a foreach step is long, what the guard adds is a tenth of it
    return measure_clipped(workload(row), fused, often, peers)


@pytest.fixture(scope="session")
def installed(figures: Figures) -> bool:
    """Whether stabilityguard is there to be compared with."""
    found = find_spec("stabilityguard") is not None
    if not found:
        figures.note("stabilityguard is not installed, so it was not measured: pip install 'nanscan[bench]'")
    return found


@pytest.fixture(scope="session")
def compile_rows(request: pytest.FixtureRequest) -> list[str]:
    return request.config.getoption("--compile-rows").split(",")


@pytest.mark.benchmark(timer=CLOCK.now)
@pytest.mark.parametrize("command", ["bare", "guarded", "loop", "stabilityguard"])
@pytest.mark.parametrize("row", WORKLOADS)
def test_step(benchmark, figures: Figures, plan: Plan, installed: bool, row: str, command: str) -> None:
    result = unclipped(row, plan, installed)
    if command not in result.timings:
        pytest.skip(f"{command} was not measured")
    benchmark.group = f"step {row}"
    record(benchmark, result.timings.samples[command], row=row, command=command)
    if command == "guarded":
        figures.add("step", result, print_step_rows)


@pytest.mark.benchmark(timer=CLOCK.now)
@pytest.mark.parametrize("command", ["bare", "guarded", "loop", "torch clip", "torch.compile"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize("row", WORKLOADS)
def test_clipped_step(
    benchmark, figures: Figures, plan: Plan, compile_rows: list[str], row: str, fused: bool, command: str
) -> None:
    result = clipped(row, fused, plan, compiled=row in compile_rows and not fused)
    if command not in result.timings:
        pytest.skip(f"{command} is measured for foreach AdamW and {', '.join(compile_rows)} only (--compile-rows)")
    benchmark.group = f"clipped step {row} {result.optimizer}"
    record(benchmark, result.timings.samples[command], row=row, optimizer=result.optimizer, command=command)
    if command == "guarded":
        figures.add("clipped", result, print_clipped_rows)
