"""Mixed precision: what loss scaling, checking, clipping and stepping read and write of the gradients, and how long.

    python -m benchmarks scaler
    python -m benchmarks.bench_scaler            the same as a plain table, in one minute

Every command makes one whole step of AdamW with a loss scale of 1,024 and, but for the rows without, clips to half of
the norm. Passes and bytes are counted, times are measured, both on the same calls:

- PyTorch's passes: a dispatch mode sees every operator that gets a gradient. It reads it; where its schema says that it
  changes it, it writes it too. A fused optimizer writes the gradients only if it is given a `grad_scale`.
- nanscan's own: its compiled scan reads each gradient once, its scaling reads and writes it; neither is an operator, so
  the calls are counted. (A chunk in which the scan finds a NaN or Inf is read again; there is none here.)

What happens to parameters and optimizer state is the same for all and left out. Gradients are float32, on the CPU; they
are restored before every turn, untimed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nanscan
from benchmarks.conftest import Figures
from benchmarks.replay import CLOCK, record
from nanscan import engine
from nanscan.bench import Plan, workload
from nanscan.bench.gradients import make_gradients
from nanscan.bench.step_rows import Twins, half_norm
from nanscan.bench.table import print_table, show_time
from nanscan.bench.timing import Timings, interleave

SCALE = 1024.0
ROWS = ("mlp", "resnet50")
COMMANDS = ("torch, clip", "nanscan, clip", "torch, no clip", "nanscan, no clip")


@dataclass
class Traffic:
    """Passes over all gradients, in units of their size."""

    reads: float = 0.0
    writes: float = 0.0
    by: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, share: float, writes: bool) -> None:
        self.reads += share
        self.writes += share * writes
        self.by[what] = "read and written" if writes else "read"

    @property
    def bytes_per_element(self) -> float:
        return 4 * (self.reads + self.writes)


class CountOperators(TorchDispatchMode):
    """Adds up what the operators read and write of some gradients."""

    def __init__(self, grads: list[torch.Tensor], traffic: Traffic) -> None:
        super().__init__()
        self.sizes = {grad.data_ptr(): grad.numel() for grad in grads}
        self.total, self.traffic = sum(self.sizes.values()), traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            tensors = value if isinstance(value, (list, tuple)) else [value]
            touched = {t.data_ptr() for t in tensors if isinstance(t, torch.Tensor) and t.layout is torch.strided}
            elements = sum(self.sizes.get(pointer, 0) for pointer in touched)
            if elements:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                if func.__name__.startswith("_fused") and given.get("grad_scale") is None:
                    writes = False
                self.traffic.add(func.__name__.split(".")[0], elements / self.total, writes)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(grads: list[torch.Tensor]) -> Iterator[Traffic]:
    """Counts what happens to the gradients in the block."""
    traffic = Traffic()
    scan, scale = engine.scan_grads, engine.scale_grads_

    def counted_scan(*args: Any, **kwargs: Any) -> Any:
        traffic.add("nanscan's scan", 1.0, False)
        return scan(*args, **kwargs)

    def counted_scale(*args: Any, **kwargs: Any) -> None:
        traffic.add("nanscan's scaling", 1.0, True)
        scale(*args, **kwargs)

    engine.scan_grads, engine.scale_grads_ = counted_scan, counted_scale
    try:
        with CountOperators(grads, traffic):
            yield traffic
    finally:
        engine.scan_grads, engine.scale_grads_ = scan, scale


@dataclass(frozen=True)
class ScalerRow:
    """One step of each command: seconds, and what it reads and writes of the gradients."""

    row: str
    optimizer: str
    rounds: int
    medians: dict[str, float]
    traffic: dict[str, Traffic]
    timings: Timings = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        traffic = {name: asdict(each) | {"bytes": each.bytes_per_element} for name, each in self.traffic.items()}
        names = ("row", "optimizer", "rounds", "medians")
        return {name: getattr(self, name) for name in names} | {"traffic": traffic}


def commands_of(twins: Twins, max_norm: float) -> dict[str, Callable[[], None]]:
    """Whole steps, from scaled gradients to the next scale."""
    parameters = twins.made.parameters

    def theirs(clip: bool) -> Callable[[], None]:
        scaler, optimizer = _scaler(torch.amp.GradScaler), twins.optimizer()

        def step() -> None:
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
            scaler.step(optimizer)
            scaler.update()

        return step

    def ours(clip: bool) -> Callable[[], None]:
        scaler = _scaler(nanscan.GradScaler)
        optimizer = nanscan.wrap(twins.optimizer(), clip_norm=max_norm if clip else None)

        def step() -> None:
            scaler.step(optimizer)
            scaler.update()

        return step

    return dict(zip(COMMANDS, (theirs(True), ours(True), theirs(False), ours(False)), strict=True))


def _scaler(kind: type[torch.amp.GradScaler]) -> torch.amp.GradScaler:
    scaler = kind("cpu", init_scale=SCALE, growth_interval=10**9)
    scaler.scale(torch.zeros(()))
    return scaler


def measure(name: str, fused: bool, plan: Plan | None = None) -> ScalerRow:
    """Count and time the commands over the same memory."""
    row = workload(name)
    made = make_gradients(row.shapes)
    limit = half_norm(made)
    scaled = made.flat.mul_(SCALE).clone()
    commands = commands_of(Twins(made, fused), limit)
    traffic = {}
    for command, step in commands.items():
        made.flat.copy_(scaled)
        with counting(made.grads) as counted:
            step()
        traffic[command] = counted
    timings = interleave(commands, replace(plan or Plan(), prepare=lambda: made.flat.copy_(scaled)))
    optimizer = f"AdamW {'fused' if fused else 'foreach'}"
    return ScalerRow(row.name, optimizer, timings.rounds, timings.medians(), traffic, timings)


def print_rows(rows: list[ScalerRow]) -> None:
    """The table: passes, bytes and time ratios against PyTorch's way of the same."""
    lines = []
    for row in rows:
        for command in COMMANDS:
            each, base = row.traffic[command], COMMANDS[0] if "no clip" not in command else COMMANDS[2]
            lines.append(
                [
                    f"{row.row}, {row.optimizer}: {command}",
                    f"{each.reads:.3g}",
                    f"{each.writes:.3g}",
                    f"{each.bytes_per_element:.3g}",
                    show_time(row.medians[command]),
                    f"{row.medians[command] / row.medians[base]:.2f}",
                ]
            )
    columns = ("step with a loss scale", "reads", "writes", "bytes/element", "median", "time against torch")
    note = (
        "reads and writes: passes over all gradients in a whole step, the optimizer's own included (see the docstring)"
    )
    print_table("Gradient scaler: passes over the gradients", columns, lines, note)
    for row in rows[:2]:
        for command in COMMANDS:
            passes = "; ".join(f"{what} ({how})" for what, how in row.traffic[command].by.items())
            print(f"{row.optimizer}, {command}: {passes}")


MEASURED: dict[tuple[str, bool], ScalerRow] = {}


@pytest.mark.benchmark(timer=CLOCK.now)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize("row", ROWS)
def test_scaled_step(benchmark, figures: Figures, plan: Plan, row: str, fused: bool, command: str) -> None:
    if (row, fused) not in MEASURED:
        MEASURED[row, fused] = measure(row, fused, plan)
        figures.add("scaler", MEASURED[row, fused], print_rows)
    result = MEASURED[row, fused]
    benchmark.group = f"scaled step {row} {result.optimizer}"
    record(benchmark, result.timings.samples[command], row=row, optimizer=result.optimizer, command=command)


if __name__ == "__main__":
    print_rows([measure(row, fused, Plan(seconds=6.0)) for row in ROWS for fused in (True, False)])
    sys.exit(0)
