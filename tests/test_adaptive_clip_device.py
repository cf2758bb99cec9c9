"""Adaptive limits where the device decides, on a CPU with torch's fused CPU optimizers (on CUDA if there is one)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nanscan
from nanscan import AdaptiveClip
from tests.guarded import NAN, bits

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
every_rule = pytest.mark.parametrize(
    "rule",
    [
        AdaptiveClip("autoclip", percentile=60),
        AdaptiveClip("autoclip", window=20, max_norm=3.0),
        AdaptiveClip("zclip", z_threshold=1.5),
        AdaptiveClip("agc", ratio=0.1, exclude=("0.bias",)),
    ],
    ids=str,
)


def run(rule, device, deferred, steps=80, scale=1.0, guard=None, switch=()):
    """A training whose 30th and 31st gradients are bad and whose 50th are 1,000 times too large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    optimizer = nanscan.wrap(inner, model, clip_norm=rule)
    optimizer._deferred = deferred
    optimizer._replan()
    scaler = torch.amp.GradScaler(device, init_scale=scale, growth_interval=10**6, enabled=scale != 1.0)
    for number in range(steps):
        if number in switch:
            optimizer._deferred = not optimizer._deferred
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number)).to(device)
        optimizer.zero_grad()
        loss = model(inputs).square().mean() * (1000.0 if number == 50 else NAN if number in (30, 31) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(None if scale == 1.0 else scale)
    return model, optimizer


@every_rule
@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_the_device_finds_the_limits_that_the_host_finds(rule, scale, device):
    on_host, host = run(rule, device, False, scale=scale)
    on_device, deferred = run(rule, device, True, scale=scale)
    assert deferred.skipped_steps == host.skipped_steps == 2
    for mine, theirs in zip(deferred.history, host.history, strict=True):
        assert mine.skipped == theirs.skipped
        assert mine.clip_factor == pytest.approx(theirs.clip_factor, rel=1e-5)
        assert mine.clip_limit == (None if theirs.clip_limit is None else pytest.approx(theirs.clip_limit, rel=1e-5))
    assert min(report.clip_factor for report in deferred.history) < 0.5
    for mine, theirs in zip(on_device.parameters(), on_host.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@every_rule
def test_the_history_goes_along_between_device_and_host(rule, device):
    _, host = run(rule, device, False)
    _, mixed = run(rule, device, True, switch=(10, 27, 28, 45, 60))
    factors = [report.clip_factor for report in host.history]
    assert [report.clip_factor for report in mixed.history] == pytest.approx(factors, rel=1e-4)


@every_rule
def test_no_step_waits_for_the_device(rule, device, monkeypatch):
    asked = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        real = getattr(torch.Tensor, name)
        watch = lambda self, *a, real=real, name=name: (asked.append(name), real(self, *a))[1]  # noqa: E731
        if "__" in name or device == "cuda":
            monkeypatch.setattr(torch.Tensor, name, watch)
    monkeypatch.setattr("nanscan.device_steps.DeviceSource.ready", lambda self: False)
    run(rule, device, True, steps=20)
    assert asked == []


@every_rule
def test_a_device_resumes_bit_for_bit(rule, device):
    model, optimizer = run(rule, device, True)
    state = optimizer.guard_state_dict()
    other = nanscan.wrap(torch.optim.AdamW(model.parameters(), fused=True), model, clip_norm=rule)
    other._deferred = True
    other._replan()
    other.load_guard_state_dict(state)
    for param in model.parameters():
        param.grad = torch.full_like(param, 7.0)
    kept = [param.grad.clone() for param in model.parameters()]
    optimizer.step()
    for param, grad in zip(model.parameters(), kept, strict=True):
        param.grad = grad
    other.step()
    assert bits(other.guard_state_dict()["clip"]) == bits(optimizer.guard_state_dict()["clip"])
    assert other.last_report.clip_limit == optimizer.last_report.clip_limit
    if rule.rule != "agc":
        assert other.last_report.clip_factor == optimizer.last_report.clip_factor < 1


def test_a_long_history_grows_on_the_device(device):
    weight = nn.Parameter(torch.zeros(1, device=device))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=0.0, fused=True), clip_norm=AdaptiveClip("autoclip"))
    optimizer._deferred = True
    optimizer._replan()
    for number in range(1100):
        weight.grad = torch.full_like(weight, float(1 + number % 100))
        optimizer.step()
    norms = optimizer.guard_state_dict()["clip"]["norms"]
    assert len(norms) == 1100
    assert optimizer.last_report.clip_limit == pytest.approx(10.9)
