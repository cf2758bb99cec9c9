"""The learning rate's back-off survives every scheduler; and what a gradient scaler does counts as it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as sched

import nanscan
from tests.guarded import INF, NAN
from tests.recovery_support import make_batch, make_model, train

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning", "ignore:The epoch parameter:UserWarning")

Schedule = Callable[[optim.Optimizer], Any]


def sequential(optimizer: optim.Optimizer) -> Any:
    parts = [sched.LinearLR(optimizer, 0.1, total_iters=4), sched.CosineAnnealingLR(optimizer, 20, eta_min=0.01)]
    return sched.SequentialLR(optimizer, parts, milestones=[7])


SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda o: sched.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: sched.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: sched.StepLR(o, 4),
    "MultiStepLR": lambda o: sched.MultiStepLR(o, [3, 9]),
    "ExponentialLR": lambda o: sched.ExponentialLR(o, 0.9),
    "ConstantLR": lambda o: sched.ConstantLR(o, 0.3, total_iters=8),
    "LinearLR": lambda o: sched.LinearLR(o, 0.1, total_iters=9),
    "PolynomialLR": lambda o: sched.PolynomialLR(o, 30),
    "CosineAnnealingLR": lambda o: sched.CosineAnnealingLR(o, 12, eta_min=0.02),
    "CosineAnnealingWarmRestarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 5, eta_min=0.02),
    "OneCycleLR": lambda o: sched.OneCycleLR(o, 0.5, total_steps=40, cycle_momentum=False),
    "CyclicLR": lambda o: sched.CyclicLR(o, 0.05, 0.5, step_size_up=4, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: sched.ReduceLROnPlateau(o, patience=2, min_lr=1e-4),
    "SequentialLR": sequential,
    "ChainedScheduler": lambda o: sched.ChainedScheduler([sched.ExponentialLR(o, 0.95), sched.StepLR(o, 5)], o),
}


def advance(scheduler: Any) -> None:
    scheduler.step(1.0) if isinstance(scheduler, sched.ReduceLROnPlateau) else scheduler.step()


def rates(optimizer: optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def two_groups(tensor: bool = False) -> tuple[nn.Module, optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    lr = torch.tensor(0.1) if tensor else 0.1
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": lr * 2}]
    return model, optim.Adam(groups, lr=lr)


def expected_schedule(make: Schedule, steps: int, tensor: bool = False) -> list[list[float]]:
    _, optimizer = two_groups(tensor)
    scheduler = make(optimizer)
    found = [rates(optimizer)]
    for _ in range(steps):
        optimizer.step()
        advance(scheduler)
        found.append(rates(optimizer))
    return found


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("guard", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_after_rollbacks_the_schedule_is_the_old_one_times_the_back_off(name: str, guard: bool, tensor: bool) -> None:
    expected = expected_schedule(SCHEDULES[name], 24, tensor)
    model, optimizer = two_groups(tensor)
    optimizer = nanscan.wrap(optimizer, model) if guard else optimizer
    scheduler = SCHEDULES[name](optimizer)
    recovery = nanscan.Recovery(model, optimizer, scheduler=scheduler, snapshot_every=3)
    fails = {5: 1, 11: 2}  # how often, at which step
    factor = 1.0
    while recovery.step_index < 24:
        train(model, optimizer, make_batch(recovery.step_index))
        advance(scheduler)
        at = recovery.step_index
        if fails.get(at, 0):
            fails[at] -= 1
            factor /= 2
            assert recovery.step(loss=NAN)
        else:
            recovery.step()
        assert rates(optimizer) == pytest.approx([factor * lr for lr in expected[recovery.step_index]], rel=1e-5)
    assert factor == 0.125
    assert [float(lr) for lr in scheduler.get_last_lr()] == pytest.approx(rates(optimizer))


@pytest.mark.parametrize("shared", [False, True])
def test_a_tensor_rate_is_scaled_in_place_and_once(shared: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    lr = torch.tensor(0.5)
    groups = [{"params": model[0].parameters(), "lr": lr}, {"params": model[1].parameters()}]
    optimizer = optim.Adam(groups, lr=lr if shared else torch.tensor(0.5))
    recovery = nanscan.Recovery(model, optimizer)
    live = [group["lr"] for group in optimizer.param_groups]
    for expected in (0.25, 0.125):
        assert recovery.step(loss=NAN)
        assert all(group["lr"] is before for group, before in zip(optimizer.param_groups, live, strict=True))
        assert rates(optimizer) == [expected, expected]


def test_several_schedulers_may_be_given_but_not_with_a_manager(tmp_path: Any) -> None:
    model, optimizer = two_groups()
    several = [sched.ExponentialLR(optimizer, 0.9), sched.StepLR(optimizer, 2)]
    recovery = nanscan.Recovery(model, optimizer, scheduler=several)
    assert recovery.step(loss=NAN)
    assert several[0].base_lrs == [0.05, 0.1]
    with pytest.raises(ValueError, match="a manager stores one scheduler, got 2.*ChainedScheduler"):
        nanscan.Recovery(model, optimizer, scheduler=several, manager=nanscan.CheckpointManager(tmp_path))


# ---- gradient scaler -------------------------------------------------------------------------------------------------


def scaled_step(
    model: nn.Module, optimizer: optim.Optimizer, scaler: Any, fits_below: float, recovery: nanscan.Recovery
) -> bool:
    """One step whose gradients overflow at scales above `fits_below` (as float16's would)."""
    optimizer.zero_grad()
    loss = model(make_batch(0)).square().mean()
    scaler.scale(loss).backward()
    if scaler.get_scale() > fits_below:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.fill_(INF)
    scaler.step(optimizer)
    scaler.update()
    return recovery.step()


@pytest.mark.parametrize("guard", [False, True], ids=["plain", "guarded"])
def test_a_scaler_that_searches_for_its_scale_does_not_trigger(guard: bool) -> None:
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    optimizer = nanscan.wrap(optimizer, model) if guard else optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    recovery = nanscan.Recovery(model, optimizer, scaler=scaler, patience=2)
    results = [scaled_step(model, optimizer, scaler, 4.0, recovery) for _ in range(20)]
    assert not any(results) and scaler.get_scale() == 4.0
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0})  # as it grows after many good steps
    assert not scaled_step(model, optimizer, scaler, 4.0, recovery)


@pytest.mark.parametrize("guard", [False, True], ids=["plain", "guarded"])
def test_gradients_that_overflow_at_a_scale_below_one_trigger_after_patience(guard: bool) -> None:
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    optimizer = nanscan.wrap(optimizer, model) if guard else optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    recovery = nanscan.Recovery(model, optimizer, scaler=scaler, patience=2)
    results = []
    while not any(results):
        results.append(scaled_step(model, optimizer, scaler, 0.0, recovery))
    assert len(results) == 4  # 8 -> 4 -> 2 (the search) -> 1 -> 0.5
    assert scaler.get_scale() == 8.0 and recovery.rollbacks[0].cause == "skips"
    assert not scaled_step(model, optimizer, scaler, 8.0, recovery)


def test_a_scale_that_does_not_fall_any_more_is_no_search() -> None:
    model = make_model()
    optimizer = nanscan.wrap(optim.SGD(model.parameters(), lr=0.01), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, backoff_factor=1.0 - 1e-9)
    recovery = nanscan.Recovery(model, optimizer, scaler=scaler, patience=2)
    assert [scaled_step(model, optimizer, scaler, 0.0, recovery) for _ in range(3)] == [False, False, True]


def test_a_scaler_left_in_the_middle_of_a_step_is_ready_for_the_next() -> None:
    model = make_model()
    optimizer = nanscan.wrap(optim.SGD(model.parameters(), lr=0.01), model, max_consecutive_skips=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    recovery = nanscan.Recovery(model, optimizer, scaler=scaler)
    for fits in (0.0, 8.0):
        with recovery:
            optimizer.zero_grad()
            scaler.scale(model(make_batch(0)).square().mean()).backward()
            if fits == 0.0:
                next(model.parameters()).grad.fill_(NAN)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert recovery.step() is (fits == 0.0)
    assert optimizer.last_report.finite and not optimizer.step_was_skipped


def test_a_disabled_scaler_is_as_none() -> None:
    model = make_model()
    optimizer = nanscan.wrap(optim.SGD(model.parameters(), lr=0.01), model)
    recovery = nanscan.Recovery(model, optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False), patience=1)
    train(model, optimizer, make_batch(0, NAN))
    assert recovery.step() is True
