"""A watched forward and backward against a plain one, and against transformers' DebugUnderflowOverflow if it is there.

    python -m benchmarks watch                both models, as pytest-benchmark rows
    python -m benchmarks.bench_watch          the tables of docs/ranges.md: time, and who says what of a diverging run

Goals: `every=1` at most 10 % on top of a plain step, `every=50` at most 1 %; an order cheaper than the peer.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import nanscan
from benchmarks.models import gpt_step, resnet_step
from nanscan.bench import Plan
from nanscan.bench.timing import Timings, interleave
from nanscan.demo.data import batches, load_digits
from nanscan.demo.model import DigitNet

MODELS = {"ResNet-18": resnet_step, "GPT, 4 layers": gpt_step}
PLAIN, EACH, IDLE, PEER = "plain", "watch", "watch, a step not measured", "DebugUnderflowOverflow"
GOALS = {EACH: 1.10, "watch(every=50)": 1.01}


def debugger(model: nn.Module) -> Any:
    """The peer: looks at weights, inputs and outputs of each module; prints the last of them and raises on a NaN."""
    from transformers.debug_utils import DebugUnderflowOverflow

    return DebugUnderflowOverflow(model)


def ways() -> dict[str, Callable[[nn.Module], Any]]:
    """How a model is prepared, by name; each returns what must live as long as the model is run."""
    found: dict[str, Callable[[nn.Module], Any]] = {
        PLAIN: lambda model: None,
        EACH: nanscan.watch,
        IDLE: lambda model: nanscan.watch(model, every=10**9),  # its step 0 is the warm-up
    }
    if find_spec("transformers") is not None:
        found[PEER] = debugger
    return found


@cache
def measure(name: str, seconds: float = 30.0) -> Timings:
    """Seconds for a step of each way, interleaved. Each has a model of its own, all with the same weights."""
    commands, keep = {}, []
    for way, prepare in ways().items():
        model, commands[way] = MODELS[name]()
        keep.append((model, prepare(model)))
    return interleave(commands, Plan(seconds=seconds, min_rounds=10, block=0.0))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", (PLAIN, EACH, IDLE, PEER))
def test_step(benchmark: Any, name: str, way: str) -> None:
    from benchmarks.replay import record

    timings = measure(name)
    if way not in timings:
        pytest.skip("transformers is not installed")
    benchmark.group = f"watch: {name}"
    record(benchmark, timings.samples[way], row=name, command=way)


def overhead_table(seconds: float) -> Iterator[str]:
    """Time on top of a plain step; `every=50` is one measured step and 49 that are not."""
    yield "| Model | Way | ms a step | times plain | goal |\n|---|---|---|---|---|"
    for name in MODELS:
        times = measure(name, seconds).medians()
        idle = times.pop(IDLE)
        times["watch(every=50)"] = (times[EACH] + 49 * idle) / 50
        for way, value in sorted(times.items(), key=lambda item: item[1]):
            goal = f"≤ {GOALS[way]:.2f}" if way in GOALS else ""
            yield f"| {name} | {way} | {value * 1e3:.1f} | {value / times[PLAIN]:.3f} | {goal} |"


def findings(dtype: torch.dtype, prepare: Callable[[nn.Module], Any]) -> tuple[str, Any]:
    """How a run at ten times the good learning rate ends, and what `prepare` made."""
    torch.manual_seed(0)
    model = DigitNet().to(dtype)
    made = prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
    for step, (images, labels) in enumerate(batches(load_digits(), 2, 64, seed=0)):
        optimizer.zero_grad()
        try:
            loss = nn.functional.cross_entropy(model(images.to(dtype)).float(), labels)
        except ValueError as error:  # the peer stops the run
            return f"stops at step {step}: {str(error).splitlines()[0].strip()[:60]}", made
        if not math.isfinite(loss.item()):
            return f"loss not finite at step {step}", made
        loss.backward()
        optimizer.step()
    return "ends well", made


def findings_table() -> Iterator[str]:
    """Who names what, and when."""
    yield "| dtype | plain | nanscan.watch | DebugUnderflowOverflow |\n|---|---|---|---|"
    for dtype in (torch.float32, torch.float16):
        plain, _ = findings(dtype, lambda model: None)
        _, ranges = findings(dtype, nanscan.watch)
        yield f"| {dtype} | {plain} | {ranges.first_bad.describe()} | {_of_the_peer(dtype)} |"


def _of_the_peer(dtype: torch.dtype) -> str:
    if find_spec("transformers") is None:
        return "not installed"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ending, _ = findings(dtype, debugger)
    last = re.findall(r"^\s+(\S+) (\S+)$", printed.getvalue(), re.MULTILINE)
    return ending + (f"; the last frame printed is that of '{last[-1][0]}'" if last else "")


def main(seconds: float = 20.0) -> int:
    for line in (*overhead_table(seconds), "", *findings_table()):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:])))
