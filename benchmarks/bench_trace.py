"""What a traced step costs, beside the ways to look for a NaN that PyTorch has.

    python -m benchmarks trace
    python benchmarks/bench_trace.py            the same as a plain table, in one minute

Each row is one forward and backward; the rows of a model take turns, so that a busy machine slows all of them alike.
Goals: traced <= 1.25 x plain on ResNet-18 and <= 1.8 x on the GPT; what tracing adds is at most a third (ResNet-18), a
fifth (GPT) of what a dispatch mode with `isfinite().all()` adds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nanscan
from benchmarks.models import gpt_step, resnet_step

GOALS = {"ResNet-18": (1.25, 3.0), "GPT, 4 layers": (1.8, 5.0)}
MODELS = {"ResNet-18": resnet_step, "GPT, 4 layers": gpt_step}


class EmptyMode(TorchDispatchMode):
    """A dispatch mode that does nothing: the floor for anything that sees every op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class FiniteMode(TorchDispatchMode):
    """Asks each output at once, as one would write it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, torch.Tensor) and item.is_floating_point():
                bool(torch.isfinite(item).all())
        return out


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "nanscan.trace": nanscan.trace,
    "empty dispatch mode": EmptyMode,
    "dispatch mode + isfinite": FiniteMode,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
}


def measure(name: str, rounds: int = 15) -> dict[str, float]:
    """Median milliseconds of a step, for each way."""
    model, step = MODELS[name]()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_ in range(rounds + 2):
        for way, make in WAYS.items():
            with make():
                start = time.perf_counter()
                step()
                spent = time.perf_counter() - start
            if round_ >= 2:
                times[way].append(spent * 1e3)
    return {way: statistics.median(values) for way, values in times.items()}


def table(name: str, times: dict[str, float]) -> str:
    """The ratios, and the goals beside them."""
    plain = times["plain"]
    lines = [f"{name}: plain {plain:.2f} ms"]
    lines += [f"  {way:<26}{value:8.2f} ms  {value / plain:5.2f} x" for way, value in times.items()]
    ratio, less = GOALS[name]
    added = times["nanscan.trace"] - plain
    other = times["dispatch mode + isfinite"] - plain
    lines.append(f"  goals: <= {ratio} x; adds {other / max(added, 1e-9):.1f} x less than isfinite (>= {less})")
    return "\n".join(lines)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_step(benchmark: Any, name: str, way: str) -> None:
    model, step = MODELS[name]()
    benchmark.group = f"trace: {name}"

    def run() -> None:
        with WAYS[way]():
            step()

    benchmark.pedantic(run, rounds=10, warmup_rounds=2)


def main() -> int:
    for name in MODELS:
        print(table(name, measure(name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
