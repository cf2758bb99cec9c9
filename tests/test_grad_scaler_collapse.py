"""A loss scale that was too high, one that collapsed, one that never grows, and a true NaN are told apart."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import nanscan
from tests.guarded import INF, NAN

quiet = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
ways = pytest.mark.parametrize("way", ["host", "device", "bare"])


def setup(way="host", scale=65536.0, scaler=None, **options):
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.AdamW([("p", weight)], lr=0.1, fused=way == "device")
    if way != "bare":
        optimizer = nanscan.wrap(optimizer, max_consecutive_skips=None, **options)
    if way == "device":
        optimizer._deferred = True  # as if the parameters were on one CUDA device
        optimizer._replan()
    return weight, optimizer, nanscan.GradScaler("cpu", init_scale=scale, **(scaler or {}))


def turn(weight, optimizer, scaler, factor):
    optimizer.zero_grad()
    scaler.scale((weight * torch.tensor([1.0, factor])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def texts(caught):
    return [str(each.message) for each in caught]


def test_overflow_says_at_which_scale_and_what_becomes_of_it():
    weight, optimizer, scaler = setup()
    with pytest.warns(nanscan.NonFiniteWarning) as caught:
        turn(weight, optimizer, scaler, INF)
    (text,) = texts(caught)
    assert "grad of 'p' has 0 NaN, 1 Inf of 2 (first at [1])" in text
    assert "Inf at loss scale 65536: the scale was too high and will be halved." in text


def test_nan_above_min_scale_says_that_the_scale_may_have_made_it():
    weight, optimizer, scaler = setup(scaler={"backoff_factor": 0.25, "hysteresis": 2})
    with pytest.warns(nanscan.NonFiniteWarning, match="NaN at loss scale 65536: the scale may have made it") as w:
        turn(weight, optimizer, scaler, NAN)
    assert "multiplied by 0.25 at 2 such steps in a row" in texts(w)[0]


@pytest.mark.parametrize("bad", [INF, NAN])
def test_bad_gradient_at_min_scale_is_a_true_one(bad):
    weight, optimizer, scaler = setup(scale=4.0, scaler={"min_scale": 4.0})
    with pytest.warns(nanscan.NonFiniteWarning) as caught:
        turn(weight, optimizer, scaler, bad)
    (text,) = texts(caught)
    kind = "NaN" if bad != INF else "Inf"
    assert f"at loss scale 4, which is min_scale: the scale is not the cause, this is a true {kind}" in text
    assert "grad of 'p'" in text
    assert scaler.get_scale() == 4.0


@ways
def test_collapse_is_said_once_with_the_parameter(way):
    weight, optimizer, scaler = setup(way, scale=8.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            turn(weight, optimizer, scaler, NAN)
        if way == "device":
            assert optimizer.skipped_steps == 8
    collapse = [text for text in texts(caught) if "collapsed" in text]
    assert len(collapse) == 1
    assert "it fell from 8 to min_scale=1" in collapse[0]
    assert "grad of 'p' has 1 NaN, 0 Inf of 2 (first at [1])" in collapse[0]
    assert scaler.get_scale() == 1.0


@ways
def test_scale_that_finds_its_place_is_no_collapse(way):
    weight, optimizer, scaler = setup(way, scale=2.0**16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(40):
            turn(weight, optimizer, scaler, INF if step < 12 else 1.0)
    assert [text for text in texts(caught) if "collapsed" in text or "never grows" in text or "clipped" in text] == []
    assert scaler.get_scale() == 16.0


def run(way, overflow_at, steps, interval):
    weight, optimizer, scaler = setup(way, scaler={"growth_interval": interval})
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            factor = float(torch.randn((), generator=generator))
            turn(weight, optimizer, scaler, INF if overflow_at(step) else factor)
        if way == "device":
            assert optimizer.skipped_steps > 0
    return [text for text in texts(caught) if "never grows" in text], scaler


@ways
def test_scale_that_never_grows_is_said_once(way):
    said, scaler = run(way, lambda step: step % 4 == 3, steps=60, interval=5)
    assert len(said) == 1
    assert "growth_interval=5" in said[0]
    assert "give a smaller growth_interval" in said[0]
    assert scaler.get_scale() < 65536.0


@ways
def test_healthy_ups_and_downs_of_the_scale_are_no_alarm(way):
    said, scaler = run(way, lambda step: step < 14 or step % 17 == 0, steps=120, interval=5)
    assert said == []
    assert scaler.get_scale() > 16.0


@quiet
@pytest.mark.parametrize("way", ["host", "device"])
@pytest.mark.parametrize("dead", [NAN, INF])
def test_scale_that_is_no_number_is_named_and_the_way_out_said(way, dead):
    weight, optimizer, scaler = setup(way)
    turn(weight, optimizer, scaler, 1.0)
    scaler._scale.fill_(dead)
    weight.grad = torch.ones(2)
    scaler.step(optimizer)
    assert optimizer.step_was_skipped
    assert f"the loss scale itself is {dead:g}" in optimizer.last_report.scale_note
    assert "scaler.update(new_scale=65536.0)" in optimizer.last_report.scale_note
    scaler.update(new_scale=65536.0)
    turn(weight, optimizer, scaler, 1.0)
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize(("saved", "mended"), [(0.0, 1.0), (2.0**-14, 1.0), (NAN, 4096.0), (INF, 4096.0)])
@pytest.mark.parametrize("begun", [False, True])
def test_collapsed_scale_in_a_loaded_state_is_said_and_mended(saved, mended, begun):
    scaler = nanscan.GradScaler("cpu", init_scale=4096.0)
    if begun:
        scaler.scale(torch.zeros(()))
    state = {**torch.amp.GradScaler("cpu").state_dict(), "scale": saved}
    with pytest.warns(UserWarning, match=f"loaded state is {saved:g}: it had collapsed .* set to {mended:g}"):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == mended


def test_true_nan_ends_the_run_and_says_that_the_scale_is_not_the_cause():
    weight = nn.Parameter(torch.ones(2))
    optimizer = nanscan.wrap(torch.optim.SGD([("p", weight)], lr=0.1), max_consecutive_skips=5)
    scaler = nanscan.GradScaler("cpu", init_scale=8.0)
    said = pytest.raises(nanscan.TrainingDiverged, match="at loss scale 1, which is min_scale: .* a true NaN")
    with said, pytest.warns(nanscan.NonFiniteWarning):
        for _ in range(5):
            turn(weight, optimizer, scaler, NAN)


def test_log_has_the_loss_scale_and_what_it_means():
    lines = []
    weight, optimizer, scaler = setup(log=lines.append)
    with pytest.warns(nanscan.NonFiniteWarning):
        turn(weight, optimizer, scaler, INF)
    turn(weight, optimizer, scaler, 1.0)
    assert [(line.loss_scale, line.scale_note[:25]) for line in lines] == [
        (65536.0, "Inf at loss scale 65536: "),
        (32768.0, ""),
    ]
    assert nanscan.StepReport.from_dict(lines[0].to_dict()) == lines[0]


def test_of_two_optimizers_the_one_that_overflows_is_told_that_the_scale_never_grows():
    healthy, failing = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizers = [nanscan.wrap(torch.optim.SGD([p], lr=1e-3)) for p in (healthy, failing)]
    scaler = nanscan.GradScaler("cpu", growth_interval=5)
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(60):
            factors = torch.randn(2, generator=generator)
            scaler.scale((healthy * factors).sum() + (failing * (INF if step % 4 == 3 else factors)).sum()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    assert len([text for text in texts(caught) if "never grows" in text]) == 1
