"""nanscan.GradScaler and a guarded optimizer: one scan for everything, and only gradients move the scale."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import nanscan
from nanscan import engine
from tests.guarded import INF, NAN, bits

quiet = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")
pytestmark = pytest.mark.usefixtures("either_way_of_clipping")
MAKERS = {
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "loop": lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=False),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))


def setup(make=MAKERS["loop"], scale=1024.0, scaler=None, on_device=False, **options):
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = nanscan.wrap(make([("p", weight)]), **options)
    if on_device:
        optimizer._deferred = True  # as if the parameters were on one CUDA device
        optimizer._replan()
    return weight, optimizer, nanscan.GradScaler("cpu", init_scale=scale, **(scaler or {}))


def turn(weight, optimizer, scaler, factors, loss=None):
    optimizer.zero_grad()
    scaler.scale((weight * torch.tensor(factors)).sum()).backward()
    if loss is not None:
        optimizer.observe(loss)
    result = scaler.step(optimizer)
    scaler.update()
    return result


@every_maker
def test_a_step_scans_once_and_never_calls_torchs_unscaling(make, monkeypatch):
    weight, optimizer, scaler = setup(make, clip_norm=1.0)
    scans, real = [], engine.scan_grads
    monkeypatch.setattr(engine, "scan_grads", lambda *a, **k: scans.append(1) or real(*a, **k))
    for name in ("_unscale_grads_", "_check_inf_per_device"):
        monkeypatch.setattr(torch.amp.GradScaler, name, lambda *_: pytest.fail("torch's pass over the gradients"))
        monkeypatch.setattr(nanscan.GradScaler, name, lambda *_: pytest.fail("a second pass over the gradients"))
    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", lambda *_: pytest.fail("torch's kernel"))
    for factors in ([3.0, 4.0], [0.1, 0.2], [30.0, -40.0]):
        turn(weight, optimizer, scaler, factors)
        norm = torch.tensor(factors).norm().item()
        assert optimizer.last_report.norm == pytest.approx(norm)
        assert optimizer.last_report.clip_factor == pytest.approx(min(1.0, 1.0 / norm), rel=1e-5)
        assert optimizer.last_report.loss_scale == 1024.0
    assert len(scans) == 3


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_clip_norm_is_compared_with_the_unscaled_norm_and_applied_once(unscale_first, on_device):
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=1.0, fused=on_device), clip_norm=1.0)
    if on_device:
        optimizer._deferred = True
        optimizer._replan()
    scaler = nanscan.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((weight * 0.5).sum()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
        assert weight.grad.item() == 0.5
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.5
    assert (optimizer.last_report.norm, optimizer.last_report.loss_scale) == (0.5, 1024.0)


@quiet
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_overflow_skips_names_the_parameter_and_halves_the_scale(bad, on_device):
    weight, optimizer, scaler = setup(MAKERS["fused"], on_device=on_device)
    turn(weight, optimizer, scaler, [1.0, 1.0])
    before = bits(weight), bits(optimizer.state_dict())
    assert turn(weight, optimizer, scaler, [1.0, bad]) is None
    assert (bits(weight), bits(optimizer.state_dict())) == before
    assert (optimizer.step_was_skipped, scaler.get_scale()) == (True, 512.0)
    assert [row.name for row in optimizer.last_report.bad] == ["p"]
    assert (optimizer.last_report.loss_scale, "loss scale 1024" in optimizer.last_report.scale_note) == (1024.0, True)


@quiet
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("factor", "scale"), [(1.0, 1024.0), (INF, 512.0)])
def test_a_bad_loss_skips_but_only_gradients_lower_the_scale(factor, scale, on_device):
    weight, optimizer, scaler = setup(MAKERS["fused"], on_device=on_device)
    turn(weight, optimizer, scaler, [1.0, factor], loss=NAN)
    assert optimizer.step_was_skipped
    assert scaler.get_scale() == scale
    assert "the loss itself is NaN" in optimizer.last_report.scale_note


def test_a_spike_that_is_skipped_leaves_the_scale():
    weight, optimizer, scaler = setup(on_spike="skip")
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        turn(weight, optimizer, scaler, (1.0 + 0.1 * torch.rand(2, generator=generator)).tolist())
    with pytest.warns(nanscan.NonFiniteWarning, match="spike|sigma"):
        turn(weight, optimizer, scaler, [1e4, 1e4])
    assert (optimizer.step_was_skipped, scaler.get_scale()) == (True, 1024.0)


@quiet
@pytest.mark.parametrize(("action", "expected"), [("zero", 0.95), ("warn", 0.95)])
def test_a_step_taken_in_spite_of_an_overflow_lowers_the_scale_too(action, expected):
    weight, optimizer, scaler = setup(on_nonfinite=action)
    turn(weight, optimizer, scaler, [0.5, INF])
    assert weight[0].item() == pytest.approx(expected)
    assert (optimizer.step_was_skipped, scaler.get_scale()) == (False, 512.0)


@quiet
def test_raise_passes_through_and_the_scaler_goes_on():
    weight, optimizer, scaler = setup(on_nonfinite="raise")
    scaler.scale((weight * INF).sum()).backward()
    with pytest.raises(nanscan.NonFiniteError, match=r"Inf at loss scale 1024: .* halved"):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf", "scaled_step"} & vars(optimizer).keys()
    scaler.update()
    assert scaler.get_scale() == 512.0
    turn(weight, optimizer, scaler, [1.0, 1.0])
    assert not optimizer.step_was_skipped


@quiet
def test_two_optimizers_with_one_scaler_are_skipped_each_for_its_own_gradients():
    a, b, c = (nn.Parameter(torch.ones(1)) for _ in range(3))
    one, two = (nanscan.wrap(torch.optim.SGD([p], lr=1.0)) for p in (a, b))
    bare = torch.optim.SGD([c], lr=1.0)
    scaler = nanscan.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        for optimizer in (one, two, bare):
            optimizer.zero_grad()
        scaler.scale((a * 0.25).sum() + (b * INF).sum() + (c * 0.125).sum()).backward()
        for optimizer in (one, two, bare):
            scaler.step(optimizer)
        scaler.update()
    assert (a.item(), b.item(), c.item()) == (0.5, 1.0, 0.75)
    assert (one.step_was_skipped, two.step_was_skipped) == (False, True)
    assert scaler.get_scale() == 2.0, "one update lowers it once, however many overflowed"


@quiet
def test_schedulers_keep_their_rate_where_the_flag_is_asked_and_nobody_is_falsely_warned():
    weight, optimizer, scaler = setup()
    bare = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, step_size=1, gamma=0.1) for each in (optimizer, bare)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step")
        for _ in range(3):
            scaler.scale((weight * INF).sum() + (bare.param_groups[0]["params"][0] * INF).sum()).backward()
            scaler.step(optimizer)
            scaler.step(bare)
            scaler.update()
            if not optimizer.step_was_skipped:
                schedulers[0].step()
        schedulers[1].step()
    assert (optimizer.param_groups[0]["lr"], optimizer.skipped_steps) == (0.1, 3)


@quiet
def test_autocast_in_float16_trains_through_an_overflow_by_the_scale():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = nanscan.wrap(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), model, clip_norm=1.0)
    scaler = nanscan.GradScaler("cpu", init_scale=2.0**24)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    skipped = [report.step for report in optimizer.history if report.skipped]
    assert skipped == list(range(len(skipped))), "at the beginning only"
    assert len(skipped) > 2
    assert losses[-1] < losses[0]


@quiet
def test_recovery_goes_back_once_the_scale_cannot_be_the_cause_any_more():
    weight, optimizer, scaler = setup(scale=4.0, max_consecutive_skips=None)
    turn(weight, optimizer, scaler, [1.0, 1.0])
    good = bits(weight)
    recovery = nanscan.Recovery(nn.ParameterList([weight]), optimizer, scaler=scaler, snapshot_every=1, patience=2)
    rolled = []
    for _ in range(3):
        turn(weight, optimizer, scaler, [NAN, 1.0])
        rolled.append(recovery.step())
    assert rolled == [False, False, True], "4 -> 2 is a search for the scale, 1 twice is not"
    assert (bits(weight), scaler.get_scale()) == (good, 4.0)
