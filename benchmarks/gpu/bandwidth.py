"""The scan's bandwidth against a device copy of the same bytes, and against torch's ways to get the same answer."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.clocks import event_plan
from benchmarks.gpu.result import Section
from nanscan import engine
from nanscan.bench import WORKLOADS, interleave
from nanscan.bench.gradients import Gradients, make_gradients
from nanscan.bench.timing import Command

FLAT = {"one tensor of 4 GiB": torch.float32, "one tensor of 2 GiB in bf16": torch.bfloat16}


def bandwidth() -> Section:
    """Bytes read per second, by the card's events; a copy counts what it reads and what it writes."""
    section = Section()
    rows: list[dict[str, Any]] = []
    for name, dtype in FLAT.items():
        rows.append(_row(name, make_gradients([(2**30,)], dtype, device="cuda"), 2.0))
    for workload in WORKLOADS.values():
        rows.append(_row(workload.title, make_gradients(workload.shapes, device="cuda"), 1.5))
        rows.append(_row(f"{workload.title} fp16", make_gradients(workload.shapes, torch.float16, device="cuda"), 1.0))
    section.figures["rows"] = rows
    for row in rows:
        section.say(_line(row))
    return section


def _commands(made: Gradients) -> dict[str, Command]:
    groups, grads = made.param_groups, made.grads
    target = torch.empty_like(made.flat)
    found, scale = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    return {
        "ours": lambda: engine.launch_grads(groups, clip_norm=1.0),
        "copy": lambda: target.copy_(made.flat),
        "sum": lambda: torch.sum(made.flat),
        "foreach": lambda: torch.nn.utils.get_total_norm(grads),
        "scaler": lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale),
    }


def _row(name: str, made: Gradients, seconds: float) -> dict[str, Any]:
    timings = interleave(_commands(made), event_plan(seconds))
    medians, size = timings.medians(), made.nbytes
    torch.cuda.empty_cache()
    return {
        "row": name,
        "nbytes": size,
        "tensors": len(made.parameters),
        "rounds": timings.rounds,
        "seconds": medians,
        "scan_gb_per_s": size / medians["ours"] / 1e9,
        "copy_gb_per_s": 2 * size / medians["copy"] / 1e9,
        "foreach_over_ours": timings.ratio("foreach", "ours"),
        "scaler_over_ours": timings.ratio("scaler", "ours"),
    }


def _line(row: dict[str, Any]) -> str:
    share = row["scan_gb_per_s"] / row["copy_gb_per_s"]
    return (
        f"{row['row']:<28} {row['seconds']['ours'] * 1e6:9.1f} µs  scan {row['scan_gb_per_s']:7.1f} GB/s, "
        f"copy {row['copy_gb_per_s']:7.1f} GB/s ({share:.2f}); foreach ÷ ours {row['foreach_over_ours']:.2f}, "
        f"scaler ÷ ours {row['scaler_over_ours']:.2f}"
    )
