"""What a traced step costs, beside the ways to look for a NaN that PyTorch has.

    python -m benchmarks trace
    python -m benchmarks.bench_trace            the same as a plain table, in one minute

Each row is one forward and backward; the rows of a model take turns, so that a busy machine slows all of them alike.
sherlorch has a row where it is installed. Below the tables: what `wrap(find_origin=True)` adds to a healthy step of the
demo network (goal: at most 1 %). Times are of the processor, so that a busy machine disturbs them less.

Goals: traced <= 1.25 x plain on ResNet-18 and <= 1.8 x on the GPT; what tracing adds is at most a third (ResNet-18), a
fifth (GPT) of what a dispatch mode with `isfinite().all()` adds.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import nanscan
from benchmarks.models import gpt_step, resnet_step
from nanscan.demo.model import DigitNet

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


def _sherlorch() -> AbstractContextManager[Any]:
    import sherlorch

    return sherlorch.trace()  # forward only


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "nanscan.trace": nanscan.trace,
    "empty dispatch mode": EmptyMode,
    "dispatch mode + isfinite": FiniteMode,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
}
if importlib.util.find_spec("sherlorch"):
    WAYS["sherlorch"] = _sherlorch


def measure(name: str, rounds: int = 15) -> dict[str, float]:
    """Median milliseconds of a step, for each way."""
    model, step = MODELS[name]()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_ in range(rounds + 2):
        for way, make in WAYS.items():
            with make():
                start = time.process_time()
                step()
                spent = time.process_time() - start
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


def recorder(rounds: int = 1500) -> str:
    """What find_origin=True costs while all is well."""
    steps = [_guarded_step(find) for find in (False, True)]
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for step, spent in zip(steps, times, strict=True):
            start = time.process_time_ns()
            step()
            spent.append((time.process_time_ns() - start) / 1e3)
    off, on = (statistics.median(sorted(spent)[: rounds // 2]) for spent in times)
    return f"demo network, guarded step: {off:.0f} us, with find_origin=True {on:.0f} us: {(on / off - 1) * 100:+.2f} %"


def _guarded_step(find_origin: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model, images, labels = DigitNet(), torch.rand(64, 64), torch.randint(0, 10, (64,))
    optimizer = nanscan.wrap(torch.optim.AdamW(model.parameters()), model, find_origin=find_origin)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("find_origin", [False, True])
def test_guarded_step(benchmark: Any, find_origin: bool) -> None:
    benchmark.group = "trace: a healthy guarded step of the demo network"
    benchmark.pedantic(_guarded_step(find_origin), rounds=300, warmup_rounds=20)


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
    print(recorder())
    return 0


if __name__ == "__main__":
    sys.exit(main())
