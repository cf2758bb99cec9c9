"""The guarded fused step against the bare one and against torch's clipping, by the wall clock."""

from __future__ import annotations

from typing import Any

import torch

import nanscan
from benchmarks.gpu.clocks import waited_plan
from benchmarks.gpu.result import Section
from nanscan.bench import WORKLOADS, Workload, interleave
from nanscan.bench.gradients import make_gradients
from nanscan.bench.step_rows import Twins, half_norm
from nanscan.bench.table import show_time
from nanscan.bench.timing import Command


def step() -> Section:
    """Seconds per step in a run of steps, and what each command adds to a bare one."""
    section = Section()
    rows = [_row(row, 2.5) for row in WORKLOADS.values()]
    section.figures["rows"] = rows
    for row in rows:
        bare = row["seconds"]["bare"]
        added = ", ".join(
            f"{name} +{show_time(took - bare)}" for name, took in row["seconds"].items() if name != "bare"
        )
        section.say(f"{row['row']:<12} bare {show_time(bare)}: {added}")
    return section


def _row(row: Workload, seconds: float) -> dict[str, Any]:
    twins = Twins(make_gradients(row.shapes, device="cuda"), fused=True)
    timings = interleave(_commands(twins), waited_plan(seconds))
    torch.cuda.empty_cache()
    return {"row": row.title, "tensors": row.tensors, "rounds": timings.rounds, "seconds": timings.medians()}


def _commands(twins: Twins) -> dict[str, Command]:
    max_norm, parameters, clipped = half_norm(twins.made), twins.made.parameters, twins.optimizer()
    asked = twins.optimizer()

    def torch_clip() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
        clipped.step()

    def torch_clip_and_ask() -> None:
        """What it takes to skip a bad step: the norm must come to the host."""
        if torch.isfinite(torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)):
            asked.step()

    return {
        "bare": twins.optimizer().step,
        "guarded": nanscan.wrap(twins.optimizer()).step,
        "guarded, clipped": nanscan.wrap(twins.optimizer(), clip_norm=max_norm).step,
        "torch clip": torch_clip,
        "torch clip and isfinite": torch_clip_and_ask,
    }
