"""How the cost of a scan grows: from 10 to 10,000 tensors, and from 1 kB to 4 GB in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.conftest import OUTPUT, Figures
from benchmarks.curves import Curve, draw, fit, print_curves
from nanscan import engine
from nanscan.bench import Plan, interleave
from nanscan.bench.gradients import fill, make_gradients
from nanscan.bench.timing import Command

COUNTS = (10, 30, 100, 300, 1000, 3000, 10_000)  # tensors of 64 elements
BYTES = tuple(2**power for power in range(10, 33, 2))  # 1 kB to 4 GB, fp32, one tensor


def test_cost_by_number_of_tensors(figures: Figures, plan: Plan) -> None:
    groups = {count: make_gradients([(64,)] * count).param_groups for count in COUNTS}
    commands = {str(count): _grads_scan(group) for count, group in groups.items()}
    _add(figures, "tensors of 64 elements", "ns per tensor", COUNTS, commands, plan)


def test_cost_by_size_of_one_tensor(figures: Figures, plan: Plan) -> None:
    sizes = [size for size in BYTES if size < 0.5 * available_memory()]
    if len(sizes) < len(BYTES):
        figures.note(
            f"one tensor was measured up to {sizes[-1] / 2**20:.0f} MiB only: too little memory is free for more"
        )
    buffer = fill(torch.empty(sizes[-1] // 4))
    commands = {str(size): _scan(buffer[: size // 4]) for size in sizes}
    _add(figures, "bytes in one tensor", "ns per kB", sizes, commands, plan)


def _grads_scan(groups: list[dict[str, object]]) -> Command:
    return lambda: engine.scan_grads(groups).finite


def _scan(tensor: torch.Tensor) -> Command:
    tensors = [tensor]
    return lambda: engine.scan(tensors).finite


def _add(
    figures: Figures, what: str, unit: str, sizes: Sequence[int], commands: dict[str, Command], plan: Plan
) -> None:
    timings = interleave(commands, plan)
    seconds = [timings.median(str(size)) for size in sizes]
    curve = Curve(what, unit, tuple(sizes), tuple(seconds), *fit(sizes, seconds))
    figures.add("linearity", curve, print_curves)
    note = draw(figures.rows["linearity"], OUTPUT / "linearity.png")
    if note:
        figures.note(note)


def available_memory() -> int:
    """Bytes that can be taken without swapping, by /proc/meminfo; 4 GB where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 4 * 2**30
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
