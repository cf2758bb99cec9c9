"""Learning-rate schedulers around a guarded optimizer, made before and after it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim import lr_scheduler as lrs

import nanscan
from tests.guarded import NAN, make_params, set_grads


def _sequential(o):
    return lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.5, 2), lrs.ExponentialLR(o, 0.9)], milestones=[2])


SCHEDULERS = {
    "StepLR": lambda o: lrs.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 3], gamma=0.5),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.5, total_iters=4),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 5),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda epoch: 0.9),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, max_lr=1.0, total_steps=8),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.1, 1.0, step_size_up=2, cycle_momentum=True),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5, 2), lrs.ExponentialLR(o, 0.9)]),
    "SequentialLR": _sequential,
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


def run(name, place, bad_at=()):
    """Learning rate and momentum after each of 5 steps, and the warnings that are not the guard's own."""
    params = make_params()
    inner = torch.optim.SGD(params, lr=0.4, momentum=0.9)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        scheduler = SCHEDULERS[name](inner) if place == "before" else None
        optimizer = inner if place == "bare" else nanscan.wrap(inner)
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        rates = []
        for step in range(5):
            set_grads(params, step, bad=NAN if step in bad_at else None)
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append((inner.param_groups[0]["lr"], inner.param_groups[0]["momentum"]))
    return rates, [str(w.message) for w in seen if "nanscan: step" not in str(w.message)]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("place", ["before", "after"])
def test_schedule_is_the_bare_optimizers_and_nothing_warns(name, place):
    expected, usual = run(name, "bare")
    rates, messages = run(name, place)
    assert rates == expected
    assert len(set(rates)) > 1, "the schedule must have done something"
    assert messages == usual


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("place", ["before", "after"])
def test_skipped_first_steps_raise_no_false_alarm_about_the_order_of_calls(name, place):
    _, usual = run(name, "bare")
    _, messages = run(name, place, bad_at=[0, 1])
    assert messages == usual
    assert not any("optimizer.step()" in message for message in messages)


def test_true_mistake_in_the_order_of_calls_is_still_warned_about():
    optimizer = nanscan.wrap(torch.optim.SGD(make_params(), lr=0.1))
    scheduler = lrs.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        scheduler.step()


def test_schedule_that_asks_for_skips_does_not_advance():
    params = make_params()
    optimizer = nanscan.wrap(torch.optim.SGD(params, lr=1.0))
    scheduler = lrs.StepLR(optimizer, step_size=1, gamma=0.1)
    for step in range(3):
        set_grads(params, step, bad=NAN)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", nanscan.NonFiniteWarning)
            optimizer.step()
        if not optimizer.step_was_skipped:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("place", ["before", "after"])
def test_scheduler_state_round_trips(place):
    params = make_params()
    inner = torch.optim.SGD(params, lr=0.4)
    first = lrs.StepLR(inner, 1, gamma=0.5) if place == "before" else None
    optimizer = nanscan.wrap(inner)
    first = first or lrs.StepLR(optimizer, 1, gamma=0.5)
    set_grads(params, 0)
    optimizer.step()
    first.step()
    again = nanscan.wrap(torch.optim.SGD(make_params(), lr=0.4))
    second = lrs.StepLR(again, 1, gamma=0.5)
    second.load_state_dict(first.state_dict())
    again.load_state_dict(optimizer.state_dict())
    assert second.get_last_lr() == [0.2]
    assert again.optimizer.param_groups[0]["lr"] == 0.2
