"""What goes wrong around a step (a log, an option, the inner step) leaves the guard whole and says so."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from torch import nn

import nanscan
from tests.guarded import NAN


def disk_full(report):
    raise OSError("disk full")


@pytest.mark.parametrize("action", ["skip", "raise", "zero", "warn"])
def test_log_that_raises_is_heard_once_the_step_is_noted_counted_and_warned_about(action):
    weight = nn.Parameter(torch.ones(2))
    options = {"clip_norm": nanscan.AdaptiveClip("autoclip"), "on_spike": "warn", "on_nonfinite": action}
    optimizer = nanscan.wrap(torch.optim.SGD([("w", weight)], lr=1.0), log=disk_full, check_params_every=1, **options)
    weight.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(OSError, match="disk full"):
        optimizer.step()
    state = optimizer.guard_state_dict()
    assert (state["clip"]["norms"].tolist(), state["spikes"]["norm"]["count"]) == ([5.0], 1)
    weight.grad = torch.tensor([3.0, NAN])
    expected = nanscan.NonFiniteError if action == "raise" else OSError
    with warnings.catch_warnings(record=True) as said, pytest.raises(expected) as raised:
        warnings.simplefilter("always")
        optimizer.step()
    assert str(raised.value.__cause__ or raised.value) == "disk full"
    assert [w.filename == __file__ for w in said] == [True] * {"raise": 0, "warn": 2}.get(action, 1)
    assert (optimizer.skipped_steps, optimizer.bad_parameter_steps) == (action in ("skip", "raise"), action == "warn")
    assert optimizer.last_report.action == action and len(optimizer.history) == 2


def test_wrapping_again_with_what_is_refused_changes_nothing():
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = nanscan.wrap(torch.optim.SGD(first.parameters(), lr=1.0), first, clip_norm=1.0, on_spike="warn")
    before = optimizer.policy, optimizer._limits, optimizer.model
    for options in ({"clip_norm": nanscan.AdaptiveClip("agc", exclude=("nope",))}, {"clip_value": -1.0}, {"log": 5}):
        with pytest.raises((ValueError, TypeError)):
            nanscan.wrap(optimizer, second, on_nonfinite="raise", **options)
        assert (optimizer.policy, optimizer._limits, optimizer.model) == before


def test_autoclip_that_is_given_a_window_keeps_norms_that_stand_for_all_and_not_the_largest():
    weight = nn.Parameter(torch.ones(1))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=0.0), clip_norm=nanscan.AdaptiveClip("autoclip"))
    for norm in range(100, 0, -1):
        weight.grad = torch.tensor([float(norm)])
        optimizer.step()
    nanscan.wrap(optimizer, clip_norm=nanscan.AdaptiveClip("autoclip", window=4))
    assert optimizer.guard_state_dict()["clip"]["norms"].tolist() == [13.0, 38.0, 63.0, 88.0]
    assert len(copy.deepcopy(optimizer).guard_state_dict()["clip"]["norms"]) == 4


def test_loss_observed_for_a_window_that_was_dropped_as_a_whole_does_not_reach_the_next():
    weight = nn.Parameter(torch.ones(2))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=1.0))
    with pytest.warns(nanscan.NonFiniteWarning):
        (weight * NAN).sum().backward()
        optimizer.check_microbatch(drop=True)
        optimizer.observe(NAN)
        optimizer.step()
    weight.sum().backward()
    optimizer.step()
    assert (optimizer.skipped_steps, weight.tolist()) == (1, [0.0, 0.0])


@pytest.mark.parametrize("fault", ["function", "inner step", "closure"])
def test_step_that_failed_in_the_middle_is_not_counted(fault):
    weight = nn.Parameter(torch.ones(2))
    inner = (torch.optim.LBFGS if fault == "closure" else torch.optim.SGD)([weight], lr=0.1)
    decided = ["later"] if fault == "function" else ["zero"]
    optimizer = nanscan.wrap(inner, on_nonfinite=lambda report: decided[0])
    if fault == "inner step":
        failing = inner.register_step_pre_hook(lambda *_: torch.zeros(2) @ torch.zeros(3))
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        (weight.square() * torch.tensor([NAN if len(calls) == 1 else 1.0, 1.0])).sum().backward()
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return 1.0

    weight.grad = torch.tensor([NAN, 1.0])
    with pytest.raises((ValueError, RuntimeError)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step(closure) if fault == "closure" else optimizer.step()
    if fault == "inner step":
        failing.remove()
    optimizer.zero_grad()
    assert optimizer.guard_state_dict()["counters"]["steps"] == len(optimizer.history) == 0
    assert fault != "closure" or (weight.tolist(), len(optimizer.state)) == ([1.0, 1.0], 0)
    optimizer.step(closure) if fault == "closure" else optimizer.step()
    assert (optimizer.last_report.step, len(optimizer.history)) == (0, 1)


def test_deep_copy_shares_functions_given_as_options_whatever_they_belong_to():
    class Sink:
        def __init__(self):
            self.lock, self.steps = threading.Lock(), []

        def write(self, report):
            self.steps.append(report.step)

        def decide(self, report):
            return "skip"

    sink, weight = Sink(), nn.Parameter(torch.ones(1))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=1.0), log=sink.write, on_nonfinite=sink.decide)
    twin = copy.deepcopy(optimizer)
    for each in (optimizer, twin):
        each.param_groups[0]["params"][0].grad = torch.ones(1)
        each.step()
    assert (sink.steps, twin.policy) == ([0, 0], optimizer.policy)
