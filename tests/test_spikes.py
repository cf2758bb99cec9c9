"""Spikes of the norm and of the loss: which steps are called so, and what is done about them."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch import nn

import nanscan
from nanscan import Spike, StepReport
from nanscan.demo.data import batches, load_digits
from tests.guarded import NAN, one, step, whole_state


def calm(optimizer, weight, steps=40, norm=2.0, loss=None):
    """Steps whose norm and loss scatter by a tenth."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        scatter = float(torch.randn((), generator=generator)) / 10
        if loss is not None:
            optimizer.observe(loss * (1 + scatter))
        step(optimizer, weight, [norm * (1 + scatter), 0.0])


def train(seed, warmup=0, lr=0.05, epochs=8, spike_at=None, make=torch.optim.SGD, **options):
    """A real training on digits; the loss of one batch may be 1,000 times too large."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = nanscan.wrap(make(model.parameters(), lr=lr), model, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / (warmup or 1)))
    for number, (images, labels) in enumerate(batches(load_digits(), epochs, 32, seed)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels) * (1000.0 if number == spike_at else 1.0)
        optimizer.observe(loss)
        loss.backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer


@pytest.mark.parametrize("warmup", [0, 100])
@pytest.mark.parametrize(("make", "lr"), [(torch.optim.SGD, 0.3), (torch.optim.AdamW, 1e-2)])
def test_a_normal_training_raises_no_alarm(make, lr, warmup):
    with warnings.catch_warnings():
        warnings.simplefilter("error", nanscan.NonFiniteWarning)
        _, optimizer = train(0, warmup, lr, make=make, on_spike="skip")
    losses = [report.tensors[-1].norm for report in optimizer.history]
    assert losses[0] > 2 > 0.3 > losses[-1]
    assert (optimizer.spikes, optimizer.skipped_steps) == (0, 0)


@pytest.mark.parametrize("action", ["warn", "clip", "skip"])
def test_one_bad_batch_of_a_real_training_is_found_and_nothing_else(action):
    with pytest.warns(nanscan.NonFiniteWarning, match=r"step 200 .* is a spike: .* sigma above the ") as caught:
        _, optimizer = train(0, spike_at=200, lr=1e-4 if action == "warn" else 0.05, on_spike=action)
    assert len(caught) == 1
    report = optimizer.history[200]
    assert [r.step for r in optimizer.history if r.spike] == [200]
    assert report.spike.value > report.spike.limit > report.spike.expected
    assert report.skipped == (action == "skip") and report.spike.action == action
    assert (optimizer.spikes, optimizer.skipped_steps) == (1, int(action == "skip"))
    assert report.clip_factor < 0.1 if action == "clip" else report.clip_factor == 1.0


def test_clip_holds_the_norm_to_the_limit_of_so_many_sigma():
    weight, optimizer = one([0.0, 0.0], on_spike="clip", spike_sigma=4.0)
    calm(optimizer, weight)
    with torch.no_grad():
        weight.zero_()
    with pytest.warns(nanscan.NonFiniteWarning, match="gradients multiplied by"):
        step(optimizer, weight, [1e6, 0.0])
    report = optimizer.last_report
    assert (report.spike.what, report.action, report.skipped) == ("norm", "step", False)
    assert report.clip_limit == pytest.approx(report.spike.limit)
    assert -weight[0].item() == pytest.approx(report.clip_limit, rel=1e-5)
    assert 3.0 < report.clip_limit < 6.0, "2 times e to the power of 4 sigma of 0.15"


def test_skip_leaves_weights_and_state_alone_and_clears_the_gradients():
    weight, optimizer = one([0.0, 0.0], make=torch.optim.Adam, on_spike="skip")
    calm(optimizer, weight)
    before = whole_state([weight], optimizer)
    with pytest.warns(nanscan.NonFiniteWarning, match=r"step 40 skipped: the norm 1e\+06 is a spike"):
        step(optimizer, weight, [1e6, 0.0])
    assert whole_state([weight], optimizer) == before
    assert weight.grad is None
    assert optimizer.step_was_skipped
    assert (optimizer.last_report.action, optimizer.last_report.finite) == ("skip", True)
    assert optimizer.consecutive_skips == optimizer.skipped_steps == optimizer.spikes == 1


@pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
def test_a_spike_does_not_hide_the_next_ones():
    weight, optimizer = one([0.0, 0.0], on_spike="skip")
    calm(optimizer, weight)
    for _ in range(3):
        step(optimizer, weight, [1e6, 0.0])
        calm(optimizer, weight, 10)
    assert optimizer.spikes == 3


@pytest.mark.parametrize("losses", ["positive", "negative"])
@pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
def test_a_loss_that_rises_is_a_spike_where_the_norm_is_calm(losses):
    weight, optimizer = one([0.0, 0.0], on_spike="skip")
    calm(optimizer, weight, loss=2.0 if losses == "positive" else -2.0)
    optimizer.observe(100.0)
    optimizer.observe(300.0)  # of several in an accumulation, their mean
    step(optimizer, weight, [2.0, 0.0])
    report = optimizer.last_report
    assert report.skipped
    assert (report.spike.what, report.spike.value) == ("loss", 200.0)
    assert abs(report.spike.expected) == pytest.approx(2.0, rel=0.1)


@pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
@pytest.mark.parametrize("sigma", [2.0, 6.0, 20.0])
def test_another_level_for_good_is_skipped_ten_times_at_most_and_then_accepted(sigma):
    weight, optimizer = one([0.0, 0.0], on_spike="skip", spike_sigma=sigma)
    calm(optimizer, weight, 60)
    spikes = optimizer.spikes
    calm(optimizer, weight, 60, norm=2e6)
    assert 1 <= optimizer.spikes - spikes <= 10
    assert not any(report.skipped for report in list(optimizer.history)[-45:])


def test_skipped_spikes_count_for_max_consecutive_skips():
    weight, optimizer = one([0.0, 0.0], on_spike="skip", spike_sigma=3.0, max_consecutive_skips=3)
    calm(optimizer, weight)
    with (
        pytest.warns(nanscan.NonFiniteWarning),
        pytest.raises(nanscan.TrainingDiverged, match=r"is a spike.*3 skipped steps in a row"),
    ):
        for _ in range(3):
            step(optimizer, weight, [1e30, 0.0])


def test_a_run_of_spikes_is_warned_about_once_and_the_next_run_again():
    weight, optimizer = one([0.0, 0.0], on_spike="warn", spike_sigma=3.0)
    calm(optimizer, weight)
    with pytest.warns(nanscan.NonFiniteWarning) as caught:
        for value in (1e6, 1e7, 1e8):
            step(optimizer, weight, [value, 0.0])
        calm(optimizer, weight, 30)
        step(optimizer, weight, [1e12, 0.0])
    assert [str(w.message).split(" taken")[0] for w in caught] == ["nanscan: step 40", "nanscan: step 73"]
    assert optimizer.spikes == 4
    assert caught[0].filename.endswith("guarded.py"), "it points at the line that stepped"


@pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
def test_non_finite_steps_leave_no_trace():
    weight, optimizer = one([0.0, 0.0], on_spike="warn")
    calm(optimizer, weight, loss=1.0)
    before = optimizer.guard_state_dict()["spikes"]
    optimizer.observe(NAN)
    step(optimizer, weight, [1e6, 0.0])
    optimizer.observe(1e6)
    step(optimizer, weight, [NAN, 0.0])
    assert optimizer.skipped_steps == 2
    assert optimizer.spikes == 0
    assert optimizer.guard_state_dict()["spikes"] == before


@pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closures_loss_and_norm_are_judged_too(make):
    weight = nn.Parameter(torch.zeros(2))
    optimizer = nanscan.wrap(make([weight], lr=1e-9), on_spike="skip")
    steepness = 1.0

    def closure():
        optimizer.zero_grad()
        loss = (steepness * (weight[0] + 3.0)).square()
        loss.backward()
        return loss

    for _ in range(35):
        optimizer.step(closure)
    before, steepness = weight.tolist(), 1e4
    optimizer.step(closure)
    assert optimizer.step_was_skipped and optimizer.last_report.spike is not None
    assert weight.tolist() == before


@pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
def test_report_dict_and_log_hold_spike_and_limit(tmp_path):
    path = tmp_path / "run.jsonl"
    weight, optimizer = one([0.0, 0.0], on_spike="clip", clip_norm=nanscan.AdaptiveClip("zclip"), log=path)
    calm(optimizer, weight)
    step(optimizer, weight, [1e6, 0.0])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    report = optimizer.last_report
    assert lines[-1]["spike"]["what"] == "norm" and lines[-1]["clip_limit"] == report.clip_limit
    assert lines[0]["spike"] is None and lines[0]["clip_limit"] is None
    back = StepReport.from_dict(lines[-1])
    assert isinstance(back.spike, Spike) and back.spike == report.spike and back.clip_limit == report.clip_limit
    assert StepReport.from_dict(report.to_dict()).spike == report.spike


def test_recovery_does_not_go_back_for_a_spike_that_was_skipped():
    model = nn.Linear(2, 1)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=1e-3), model, on_spike="skip")
    recovery = nanscan.Recovery(model, optimizer, patience=1)
    with pytest.warns(nanscan.NonFiniteWarning, match="is a spike"):
        for number in range(40):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)) * (1e9 if number == 35 else 1.0)).sum().backward()
            optimizer.step()
            assert not recovery.step()
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_spike": "stop"}, r"on_spike must be None, 'warn', 'clip', 'skip', got 'stop'"),
        ({"spike_sigma": 0}, r"spike_sigma must be a positive finite number, got 0"),
        ({"spike_sigma": NAN}, r"spike_sigma must be a positive finite number, got nan"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        one(**options)
