"""The quick benchmark behind ``nanscan bench``: the scan rows, then the guarded steps, within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanscan.bench.machine import describe, machine
from nanscan.bench.scan_rows import ScanRow, measure_scan, print_scan_rows
from nanscan.bench.shapes import WORKLOADS, Workload, workload
from nanscan.bench.step_rows import (
    ClippedRow,
    StepRow,
    measure_clipped,
    measure_step,
    print_clipped_rows,
    print_step_rows,
)
from nanscan.bench.timing import Plan

__all__ = ["DTYPES", "BenchResult", "quick_bench"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STEP_ROWS = ("small", "lora", "mlp", "resnet50")  # a step over the larger models takes too long for a quick look


@dataclass(frozen=True)
class BenchResult:
    """The figures of one quick run; ``print()`` shows them, ``to_dict()`` is plain data for JSON."""

    machine: dict[str, Any]
    scan: list[ScanRow]
    step: list[StepRow]
    clipped: list[ClippedRow]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``machine``, ``seconds``, and a list of rows for each suite."""
        return {
            "machine": self.machine,
            "seconds": self.seconds,
            "scan": [row.to_dict() for row in self.scan],
            "step": [row.to_dict() for row in self.step],
            "clipped": [row.to_dict() for row in self.clipped],
        }

    def print(self) -> None:
        """Print the tables, each figure beside its goal."""
        if self.scan:
            print_scan_rows(self.scan)
        if self.step:
            print_step_rows(self.step)
        if self.clipped:
            print_clipped_rows(self.clipped)
        print(f"measured on {describe(self.machine)}, in {self.seconds:.0f} s")


def quick_bench(
    rows: Sequence[str] | None = None,
    dtypes: Sequence[str] = ("float32",),
    *,
    seconds: float = 10.0,
    steps: bool = True,
    progress: Callable[[str], None] | None = None,
) -> BenchResult:
    """Measure the scan and the guarded step on this machine.

    Args:
        rows: which workloads (``small``, ``lora``, ``mlp``, ``resnet50``, ``bert``, ``gpt2``); default: all.
        dtypes: of the scanned gradients: ``float32``, ``bfloat16``, ``float16``.
        seconds: measuring time, shared evenly; setting up and a minimum of four rounds a row come on top.
        steps: measure guarded steps too (of the first four workloads).
        progress: called with what is measured next, such as ``"scan ResNet-50 float32"``.

    Returns:
        The figures.

    Raises:
        ValueError: a row or dtype that is not known; the message names those that are.

    Example:
        >>> result = quick_bench(["mlp"], seconds=0.1, steps=False)
        >>> result.scan[0].row, result.to_dict()["scan"][0]["dtype"]
        ('mlp', 'float32')
    """
    chosen = [workload(name) for name in (WORKLOADS if rows is None else rows)]
    kinds = [(name, _dtype(name)) for name in dtypes]
    stepped = [row for row in chosen if steps and row.name in STEP_ROWS]
    plan = Plan(seconds=seconds / max(1, len(chosen) * len(kinds) + 3 * len(stepped)), min_rounds=4)
    tell = progress or _silent
    start = time.perf_counter()
    scans = [_scan(row, kind, plan, tell) for kind in kinds for row in chosen]
    unclipped, clipped = _steps(stepped, plan, tell)
    return BenchResult(machine(), scans, unclipped, clipped, time.perf_counter() - start)


def _scan(row: Workload, kind: tuple[str, torch.dtype], plan: Plan, tell: Callable[[str], None]) -> ScanRow:
    tell(f"scan {row.title} {kind[0]}")
    return measure_scan(row, kind[1], plan)


def _steps(rows: Sequence[Workload], plan: Plan, tell: Callable[[str], None]) -> tuple[list[StepRow], list[ClippedRow]]:
    unclipped, clipped = [], []
    for row in rows:
        tell(f"step {row.title}")
        unclipped.append(measure_step(row, plan))
        clipped += [measure_clipped(row, fused, plan) for fused in (True, False)]
    return unclipped, clipped


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"there is no benchmark in dtype {name!r}: use one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _silent(_: str) -> None:
    pass
