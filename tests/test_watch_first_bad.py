"""Which row is named as the first that left its range, and which are not."""

from __future__ import annotations

import math
import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanscan
from benchmarks.models import gpt_step, resnet_step
from nanscan.ranges.judge import RmsHistory

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


class Scale(nn.Module):
    """Multiplies by a number that the test changes."""

    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def run(factors: Sequence[float], dtype: torch.dtype = torch.float32) -> nanscan.OutOfRange | None:
    """`first_bad` of a chain of two scalings, of which the second has these factors, step by step."""
    model = nn.Sequential(Scale(), Scale())
    with nanscan.watch(model) as ranges:
        for factor in factors:
            model[1].by = factor
            model(torch.ones(4, dtype=dtype))
        return ranges.first_bad


@pytest.mark.parametrize(
    "factor, dtype, words",
    [
        (math.nan, torch.float32, "non-finite: 4 NaN, 0 Inf of 4"),
        (math.inf, torch.float32, "non-finite: 0 NaN, 4 Inf of 4"),
        (64000.0, torch.float16, "beyond 95% of float16's maximum"),
        (-64000.0, torch.float32, "reaches -64000 in float32, beyond 95% of float16's maximum"),
        (3.3e38, torch.bfloat16, "beyond 95% of bfloat16's maximum"),
        (3.3e38, torch.float32, "beyond 95% of float32's maximum"),
    ],
)
def test_a_row_out_of_bounds_is_named_with_its_reason(factor: float, dtype: torch.dtype, words: str) -> None:
    bad = run([1.0, factor, math.nan], dtype)
    assert bad is not None and (bad.step, bad.module, bad.kind) == (1, "1", "activation")
    assert words in bad.reason and words in bad.describe() and bad.to_dict()["reason"] == bad.reason


def test_95_percent_is_the_bound() -> None:
    assert run([62_000.0]) is None and run([62_500.0]) is not None


def test_a_jump_against_its_own_history_is_named_with_the_median() -> None:
    bad = run([1.0] * 8 + [50.0])
    assert bad is not None and bad.step == 8 and "50 times the median of its last 8 steps (1)" in bad.reason


@pytest.mark.parametrize("steps_between", (0, 1))
def test_a_gradient_is_judged_though_its_step_was_looked_at_before(steps_between: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Scale())
    with nanscan.watch(model) as ranges:
        output = model(torch.ones(1, 4))
        for _ in range(steps_between):
            model(torch.ones(1, 4))
        assert ranges.first_bad is None
        output.backward(torch.full_like(output, math.nan))
        bad = ranges.first_bad
        assert bad is not None and (bad.step, bad.module, bad.kind) == (0, "1", "gradient")


@pytest.mark.parametrize("calm", range(33, 52))
def test_a_jump_after_many_calm_steps_is_named_at_its_step_with_the_median_of_the_last(calm: int) -> None:
    bad = run([4.0] * 10 + [1.0] * (calm - 10) + [130.0, 1.0])
    assert bad is not None and bad.step == calm and "130 times the median of its last 32 steps (1)" in bad.reason


def test_several_steps_are_remembered_together_as_one_by_one() -> None:
    series = [abs(math.sin(step * step)) for step in range(90)]
    for start in (0, 3, 8, 9, 40):
        for count in (1, 7, 16, 40):
            single, together = RmsHistory(), RmsHistory()
            for step, rms in enumerate(series[:start]):
                single.add(step, rms)
                together.add(step, rms)
            for step in range(start, start + count):
                single.add(step, series[step])
            together.extend(start + count - 1, series[start : start + count])
            assert vars(together) == vars(single)


def test_a_growth_by_a_factor_in_each_step_is_seen_before_the_numbers_end() -> None:
    bad = run([1e-9 * 1.6**step for step in range(60)])
    assert bad is not None and bad.step < 40 and "jumped" in bad.reason


@pytest.mark.parametrize(
    "factors",
    [
        [1.0] * 7 + [50.0],  # too little history
        [1.0] * 20 + [30.0],
        [0.0] * 20 + [1.0],  # a layer that starts at zero has no scale yet
        [1e-3 * step for step in range(1, 60)],  # it grows from there
        [1.0] * 10 + [1e-3] * 50 + [1.0],  # back to what it was
        [2.0**-step for step in range(30)],
        [float(step % 2) for step in range(40)],  # a branch that is not always taken
    ],
)
def test_healthy_courses_raise_no_alarm(factors: list[float]) -> None:
    assert run(factors) is None


@pytest.mark.parametrize("make", (resnet_step, gpt_step))
def test_healthy_models_raise_no_alarm_while_they_learn(make: object) -> None:
    model, step = make(2)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with nanscan.watch(model) as ranges:
        for _ in range(20):
            step()
            optimizer.step()
        assert ranges.first_bad is None, ranges.first_bad.describe()


class MaskedScores(nn.Module):
    def __init__(self, value: float = -math.inf) -> None:
        super().__init__()
        self.mask, self.softmax, self.value = nn.Identity(), nn.Softmax(-1), value

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape, dtype=torch.bool).triu(1)
        return self.softmax(self.mask(x.masked_fill(hidden, self.value)))


@pytest.mark.parametrize("value", (-math.inf, -1e9, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_attention_masks_raise_no_alarm(value: float, dtype: torch.dtype) -> None:
    if torch.tensor(value).to(dtype).isinf() and value != -math.inf:
        pytest.skip("this mask is -Inf in bfloat16")
    model = MaskedScores(value)
    with nanscan.watch(model) as ranges:
        for _ in range(3):
            model(torch.randn(5, 5, dtype=dtype, requires_grad=True)).sum().backward()
    assert ranges.rows("mask")[0].inf_count == (10 if value == -math.inf else 0)
    assert ranges.first_bad is None


def test_a_mask_that_was_always_there_is_not_blamed_for_a_later_nan() -> None:
    model = nn.Sequential(MaskedScores(), Scale())
    with nanscan.watch(model) as ranges:
        for factor in (1.0, math.nan):
            model[1].by = factor
            model(torch.randn(5, 5))
    assert ranges.first_bad is not None and (ranges.first_bad.step, ranges.first_bad.module) == (1, "1")


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def test_the_log_of_zero_is_blamed_for_the_nan_that_follows_from_it() -> None:
    model = nn.Sequential(Log(), Scale(0.0))
    with nanscan.watch(model) as ranges:
        model(torch.tensor([1.0, 0.0]))
    assert [row.nan_count for row in ranges.rows()] == [0, 1]
    assert ranges.first_bad is not None and (ranges.first_bad.module, ranges.first_bad.inf_count) == ("0", 1)


class RootOf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def test_a_gradient_is_named_where_backward_made_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Scale(0.0), RootOf(), Scale())
    with nanscan.watch(model) as ranges:
        (model(torch.ones(1, 2)) * 1.0).sum().backward()
    bad = ranges.first_bad
    assert bad is not None and (bad.module, bad.kind) == ("1", "gradient") and bad.inf_count == 2


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_a_run_that_diverges_names_a_layer_before_anything_is_nan(dtype: torch.dtype) -> None:
    example = runpy.run_path(str(EXAMPLES / "watch_ranges.py"))
    digits = example["load_digits"]()
    steps, healthy, ranges = example["train"](digits, 2.0, dtype)
    bad = ranges.first_bad
    assert not healthy and bad is not None and bad.step < steps and bad.kind == "activation"
    assert all(row.nan_count == row.inf_count == 0 for row in ranges.rows() if row.step <= bad.step)
    assert ranges.run_up[-1].to_dict() == {k: v for k, v in bad.to_dict().items() if k != "reason"}
    assert bad.reason in ranges.describe() and len(ranges.run_up) == bad.step + 1
    assert example["train"](digits, 0.2, dtype)[2].first_bad is None


def test_first_bad_stays_the_first_until_it_is_reset_and_the_run_up_outlives_the_ring() -> None:
    model = Scale()
    with nanscan.watch(model, history=2) as ranges:
        for factor in (1.0, math.inf, 1.0, 1.0, 1.0):
            model.by = factor
            model(torch.ones(1))
        assert ranges.first_bad is not None and ranges.first_bad.step == 1
        assert [row.step for row in ranges.run_up] == [0, 1] and [row.step for row in ranges.rows()] == [3, 4]
        ranges.reset_first_bad()
        assert ranges.first_bad is None and ranges.run_up == ()
        model.by = math.nan
        model(torch.ones(1))
        assert ranges.first_bad is not None and ranges.first_bad.step == 5
