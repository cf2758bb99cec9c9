"""One scan of the gradients against the loop, foreach, the scaler's check and the read limit, in three dtypes."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.conftest import Figures
from benchmarks.replay import CLOCK, record
from nanscan.bench import DTYPES, WORKLOADS, Plan, workload
from nanscan.bench.scan_rows import ScanRow, measure_scan, print_scan_rows

COMMANDS = ("ours", "loop", "foreach", "scaler", "flat sum", "flat dot")


@cache
def measured(row: str, dtype: str, plan: Plan) -> ScanRow:
    """All commands of one row, timed together once."""
    return measure_scan(workload(row), DTYPES[dtype], plan)


@pytest.mark.benchmark(timer=CLOCK.now)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("row", WORKLOADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scan(benchmark, figures: Figures, plan: Plan, dtype: str, row: str, command: str) -> None:
    result = measured(row, dtype, plan)
    benchmark.group = f"scan {row} {dtype}"
    record(benchmark, result.timings.samples[command], row=row, dtype=dtype, command=command)
    if command == "ours":
        figures.add("scan", result, print_scan_rows)
