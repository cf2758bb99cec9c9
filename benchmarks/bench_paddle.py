"""PaddlePaddle: our scan, clipping and guarded step against the loop over isnan and Paddle's two ways to clip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from benchmarks.conftest import Figures
from benchmarks.replay import CLOCK, record
from nanscan.bench import WORKLOADS, Plan, Timings, interleave, workload
from nanscan.bench.table import print_table, show_time
from nanscan.paddle_objects import as_torch

ROWS = [name for name in WORKLOADS if name != "gpt2"]
SCANS = ("ours", "isnan loop")
CLIPS = ("ours", "clip_grad_norm_", "ClipGradByGlobalNorm")
STEPS = ("bare", "guarded", "guarded + clip", "isnan loop + clip_grad_norm_", "ClipGradByGlobalNorm")
pytestmark = pytest.mark.benchmark(timer=CLOCK.now)


@dataclass(frozen=True)
class PaddleRow:
    """Medians of one interleaved run, in seconds; `ratios` are those of the others over ours."""

    what: str
    row: str
    tensors: int
    medians: dict[str, float]
    ratios: dict[str, float]
    timings: Timings = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("what", "row", "tensors", "medians", "ratios")}


class Made:
    """Parameters with gradients of one workload, and a way to give the gradients their first values again."""

    def __init__(self, row: str) -> None:
        import paddle

        paddle.seed(0)
        self.parameters = []
        for shape in workload(row).shapes:
            parameter = paddle.create_parameter(list(shape), "float32")
            parameter.grad = paddle.randn(list(shape)) * 1e-2
            self.parameters.append(parameter)
        self.grads = [parameter.grad for parameter in self.parameters]
        self._memory = [as_torch(grad) for grad in self.grads]
        self._first = [memory.clone() for memory in self._memory]
        self.half_norm = float(torch.nn.utils.get_total_norm(self._first)) / 2

    def restore(self) -> None:
        torch._foreach_copy_(self._memory, self._first)


def isnan_loop(made: Made) -> Callable[[], bool]:
    """What training scripts do: one operator and one read a parameter."""
    import paddle

    return lambda: any(bool(paddle.isnan(p.grad).any()) for p in made.parameters)


def scans(made: Made) -> dict[str, Callable[[], object]]:
    from nanscan.integrations.paddle.engine import scan_tensors

    return {"ours": lambda: scan_tensors(made.grads).finite, "isnan loop": isnan_loop(made)}


def clips(made: Made) -> dict[str, Callable[[], object]]:
    """To half of the norm, so that each of them has to write; ours looks for NaN and Inf besides."""
    import paddle

    from nanscan.integrations.paddle import clip_grad_norm_

    by_global_norm = paddle.nn.ClipGradByGlobalNorm(made.half_norm)
    return {
        "ours": lambda: clip_grad_norm_(made.parameters, made.half_norm),
        "clip_grad_norm_": lambda: paddle.nn.utils.clip_grad_norm_(made.parameters, made.half_norm),
        "ClipGradByGlobalNorm": lambda: by_global_norm([(p, p.grad) for p in made.parameters]),
    }


def steps(made: Made) -> dict[str, Callable[[], object]]:
    """AdamW steps over the same parameters, gradients and moments."""
    import paddle

    from nanscan.integrations.paddle import wrap

    first = paddle.optimizer.AdamW(1e-6, parameters=made.parameters)
    first.step()

    def adamw(**options: Any) -> Any:
        twin = paddle.optimizer.AdamW(1e-6, parameters=made.parameters, **options)
        twin._accumulators = first._accumulators
        twin._already_create_accumulator = first._already_create_accumulator
        return twin

    checked, loop = adamw(), isnan_loop(made)

    def by_hand() -> None:
        if not loop():
            paddle.nn.utils.clip_grad_norm_(made.parameters, made.half_norm)
            checked.step()

    return {
        "bare": adamw().step,
        "guarded": wrap(adamw()).step,
        "guarded + clip": wrap(adamw(), clip_norm=made.half_norm).step,
        "isnan loop + clip_grad_norm_": by_hand,
        "ClipGradByGlobalNorm": adamw(grad_clip=paddle.nn.ClipGradByGlobalNorm(made.half_norm)).step,
    }


MEASURES = {"scan": (scans, "ours"), "clip": (clips, "ours"), "step": (steps, "guarded + clip")}


@cache
def measured(what: str, row: str, plan: Plan) -> PaddleRow:
    """All commands of one row, timed together once; gradients are restored before each turn, untimed."""
    make, base = MEASURES[what]
    made = Made(row)
    timings = interleave(make(made), plan if what == "scan" else replace(plan, prepare=made.restore))
    ratios = {name: timings.ratio(name, base) for name in timings.samples if name != base}
    return PaddleRow(what, row, len(made.parameters), timings.medians(), ratios, timings)


@pytest.fixture(autouse=True)
def installed(figures: Figures) -> None:
    if find_spec("paddle") is None:
        figures.note("paddlepaddle is not installed, so it was not measured: pip install 'nanscan[paddle]'")
        pytest.skip("paddlepaddle is not installed")


def _record(benchmark: Any, figures: Figures, plan: Plan, what: str, row: str, command: str) -> None:
    result = measured(what, row, plan)
    benchmark.group = f"paddle {what} {row}"
    record(benchmark, result.timings.samples[command], row=row, command=command)
    if command == MEASURES[what][1]:
        figures.add(f"paddle {what}", result, print_paddle_rows)


@pytest.mark.parametrize("command", SCANS)
@pytest.mark.parametrize("row", ROWS)
def test_paddle_scan(benchmark: Any, figures: Figures, plan: Plan, row: str, command: str) -> None:
    _record(benchmark, figures, plan, "scan", row, command)


@pytest.mark.parametrize("command", CLIPS)
@pytest.mark.parametrize("row", ROWS)
def test_paddle_clip(benchmark: Any, figures: Figures, plan: Plan, row: str, command: str) -> None:
    _record(benchmark, figures, plan, "clip", row, command)


@pytest.mark.parametrize("command", STEPS)
@pytest.mark.parametrize("row", ROWS)
def test_paddle_step(benchmark: Any, figures: Figures, plan: Plan, row: str, command: str) -> None:
    _record(benchmark, figures, plan, "step", row, command)


def print_paddle_rows(rows: Sequence[PaddleRow]) -> None:
    """Print one table of ratios of medians."""
    what = rows[0].what
    base = MEASURES[what][1]
    others = list(rows[0].ratios)
    print_table(
        f"PaddlePaddle: {what}",
        ("row", "tensors", base, *(f"{name} ÷ it" for name in others)),
        [
            [workload(r.row).title, str(r.tensors), show_time(r.medians[base]), *(f"{r.ratios[n]:.2f}" for n in others)]
            for r in rows
        ],
        "medians of one run, commands interleaved in random order; clipping is to half of the norm",
    )
