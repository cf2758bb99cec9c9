"""Clipping: by value, by norm, both; by the fused optimizer or in place."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import nanscan
from tests.guarded import INF, NAN, one, step

pytestmark = pytest.mark.usefixtures("either_way_of_clipping")

quiet = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")


@pytest.mark.parametrize("fused", [True, False])
def test_clip_value_comes_first_then_clip_norm_of_what_is_left(fused):
    weight, optimizer = one([0.0, 0.0], inner={"fused": fused}, clip_value=3.0, clip_norm=2.5)
    step(optimizer, weight, [3.0, 40.0])
    factor = 2.5 / (math.hypot(3.0, 3.0) + 1e-6)
    assert weight.tolist() == pytest.approx([-3.0 * factor, -3.0 * factor])
    report = optimizer.last_report
    assert report.clip_factor == pytest.approx(factor)
    assert report.norm == pytest.approx(math.hypot(3.0, 40.0)), "norms are of the gradients before clipping"
    assert report.inf_norm == 40.0


def test_clip_value_alone_clamps_both_signs():
    weight, optimizer = one([0.0, 0.0, 0.0], clip_value=3.0)
    step(optimizer, weight, [3.5, -40.0, 1.0])
    assert weight.tolist() == [-3.0, 3.0, -1.0]
    assert optimizer.last_report.clip_factor == 1.0


def test_gradients_within_the_limits_are_not_touched():
    weight, optimizer = one([0.0, 0.0], clip_value=4.0, clip_norm=5.1)
    step(optimizer, weight, [3.0, 4.0])
    assert weight.grad.tolist() == [3.0, 4.0]
    assert optimizer.last_report.clip_factor == 1.0


@pytest.mark.parametrize("name", ["clip_norm", "clip_value"])
@pytest.mark.parametrize("value", [0, 0.0, -1.0, NAN, -INF, True, {}])
def test_limits_that_make_no_sense_are_refused(name, value):
    with pytest.raises(
        ValueError, match=rf"^{name} must be a positive number, got {value}; for no clipping give None$"
    ):
        one(**{name: value})


@pytest.mark.parametrize("value", [None, INF])
def test_no_limit_reports_the_norm_and_clips_nothing(value):
    weight, optimizer = one([0.0, 0.0], clip_norm=value, clip_value=value)
    step(optimizer, weight, [3e8, 4e8])
    assert weight.tolist() == [-3e8, -4e8]
    assert optimizer.last_report.norm == pytest.approx(5e8)


@quiet
def test_zero_clips_by_the_norm_of_the_finite_elements():
    weight, optimizer = one([0.0, 0.0, 0.0], clip_norm=1.0, on_nonfinite="zero")
    step(optimizer, weight, [3.0, NAN, 4.0])
    assert weight.tolist() == pytest.approx([-0.6, 0.0, -0.8])
    assert optimizer.last_report.finite_norm == 5.0


@pytest.mark.parametrize("fused", [True, False])
def test_norm_that_is_huge_against_the_limit_is_clipped_and_not_lost(fused):
    weight, optimizer = one([0.0, 0.0], inner={"fused": fused}, clip_norm=1e-3)
    step(optimizer, weight, [3e38, 0.0])
    assert weight.tolist() == pytest.approx([-1e-3, 0.0], rel=1e-5)


@pytest.mark.parametrize("limits", [{}, {"on_spike": "warn"}])
def test_finite_float64_gradients_whose_norm_is_beyond_float64_are_clipped_and_stepped_with(limits):
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=1.0), clip_norm=1.0, **limits)
    weight.grad = torch.full((4,), 1.5e308, dtype=torch.float64)
    optimizer.step()
    assert weight.tolist() == pytest.approx([-0.5] * 4)
    assert optimizer.last_report.finite and not optimizer.step_was_skipped


@pytest.mark.parametrize("make", [torch.optim.SGD, lambda ps, lr: torch.optim.SGD(ps, lr=lr, fused=True)])
def test_hooks_see_the_clipped_gradients(make):
    weight, optimizer = one([0.0, 0.0], make=make, clip_norm=1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(weight.grad.tolist()))
    step(optimizer, weight, [3.0, 4.0])
    assert seen == pytest.approx([0.6, 0.8])


def test_fused_optimizer_with_the_same_gradient_in_two_parameters_clips_it_once():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = nanscan.wrap(torch.optim.SGD([a, b], lr=1.0, fused=True), clip_norm=1.0)
    a.grad = b.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert a.tolist() == pytest.approx([-0.6, -0.8])
    assert b.tolist() == pytest.approx([-0.6, -0.8])


@pytest.mark.parametrize("limits", [{"clip_norm": 0.5}, {"clip_value": 0.1}, {"clip_norm": 0.5, "clip_value": 0.1}])
@pytest.mark.parametrize("fused", [False, True])
def test_a_clipped_step_is_the_same_whether_or_not_its_report_waits(limits: dict[str, float], fused: bool) -> None:
    ends = []
    for longer_way in ({}, {"check_params_every": 1000}):
        torch.manual_seed(0)
        model = nn.Linear(6, 5)
        plain = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        optimizer = nanscan.wrap(plain, model, **limits, **longer_way)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 6)).square().sum().backward()
            optimizer.step()
        reports = [{**dataclasses.asdict(report), "time": 0.0} for report in optimizer.history]
        ends.append((reports, model.weight.tolist(), optimizer.skipped_steps))
    assert ends[0] == ends[1]
    assert 0 < ends[0][0][1]["clip_factor"] < 1 or "clip_norm" not in limits
