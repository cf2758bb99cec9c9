"""torch.amp.GradScaler around a guarded optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nanscan
from tests.guarded import INF, NAN, bits

pytestmark = [
    pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning"),
    pytest.mark.usefixtures("either_way_of_clipping"),
]
MAKERS = {
    "foreach": lambda ps: torch.optim.SGD(ps, lr=1.0, momentum=0.9, foreach=True),
    "fused": lambda ps: torch.optim.SGD(ps, lr=1.0, momentum=0.9, fused=True),
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "for-loop": lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=False),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
unscaling = pytest.mark.parametrize("unscale_first", [False, True])


def setup(make, scale=1024.0, growth_interval=2000, **options):
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = nanscan.wrap(make([("p", weight)]), **options)
    return weight, optimizer, torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)


def turn(weight, optimizer, scaler, factors, unscale_first=False):
    scaler.scale((weight * torch.tensor(factors)).sum()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    result = scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return result


@every_maker
@unscaling
def test_scaled_steps_equal_the_unscaled_bare_optimizer(make, unscale_first):
    weight, optimizer, scaler = setup(make)
    theirs = nn.Parameter(torch.tensor([1.0, 2.0]))
    bare = make([theirs])
    for factors in ([0.5, 0.25], [1.0, -2.0], [0.125, 4.0]):
        turn(weight, optimizer, scaler, factors, unscale_first)
        theirs.grad = torch.tensor(factors)
        bare.step()
        assert optimizer.last_report.norm == pytest.approx(torch.tensor(factors).norm().item())
        assert optimizer.last_report.inf_norm == max(map(abs, factors))
        assert optimizer.last_report.tensors[0].norm == pytest.approx(torch.tensor(factors).norm().item())
    assert bits(weight) == bits(theirs), "a power of two scales without rounding"
    assert optimizer.skipped_steps == 0


@every_maker
@unscaling
def test_clipping_acts_once_on_the_unscaled_norm(make, unscale_first):
    weight, optimizer, scaler = setup(make, clip_norm=1.0)
    theirs = nn.Parameter(torch.tensor([1.0, 2.0]))
    bare = make([theirs])
    for factors in ([3.0, 4.0], [0.3, 0.4], [30.0, -40.0]):
        turn(weight, optimizer, scaler, factors, unscale_first)
        theirs.grad = torch.tensor(factors)
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        bare.step()
        norm = torch.tensor(factors).norm().item()
        assert optimizer.last_report.norm == pytest.approx(norm)
        assert optimizer.last_report.clip_factor == pytest.approx(min(1.0, 1.0 / (norm + 1e-6)))
    torch.testing.assert_close(weight, theirs)


@every_maker
@unscaling
@pytest.mark.parametrize("bad", [INF, NAN])
def test_bad_step_is_skipped_counted_named_and_halves_the_scale(make, unscale_first, bad):
    weight, optimizer, scaler = setup(make)
    turn(weight, optimizer, scaler, [1.0, 1.0])
    before = bits(weight), bits(optimizer.state_dict())
    assert turn(weight, optimizer, scaler, [1.0, bad], unscale_first) is None
    assert (bits(weight), bits(optimizer.state_dict())) == before
    assert optimizer.step_was_skipped
    assert optimizer.skipped_steps == 1
    assert [row.name for row in optimizer.last_report.bad] == ["p"]
    assert scaler.get_scale() == 512.0
    turn(weight, optimizer, scaler, [1.0, 1.0])
    assert not optimizer.step_was_skipped


def test_scale_grows_on_good_steps():
    weight, optimizer, scaler = setup(MAKERS["fused"], scale=4.0, growth_interval=2)
    for _ in range(4):
        turn(weight, optimizer, scaler, [0.1, 0.1])
    assert scaler.get_scale() == 16.0


def test_warning_names_the_loss_scale():
    weight, optimizer, scaler = setup(MAKERS["foreach"], scale=8.0)
    with pytest.warns(nanscan.NonFiniteWarning, match="The loss scale was 8; if that made it overflow"):
        turn(weight, optimizer, scaler, [1.0, INF])


@unscaling
def test_clip_value_acts_on_the_unscaled_gradient(unscale_first):
    weight, optimizer, scaler = setup(lambda ps: torch.optim.SGD(ps, lr=1.0), clip_value=2.0)
    turn(weight, optimizer, scaler, [3.0, -1.0], unscale_first)
    assert weight.tolist() == [-1.0, 3.0]


@pytest.mark.parametrize("action", ["zero", "warn"])
def test_zero_and_warn_unscale_too(action):
    weight, optimizer, scaler = setup(lambda ps: torch.optim.SGD(ps, lr=1.0), on_nonfinite=action)
    turn(weight, optimizer, scaler, [0.5, INF])
    assert weight.tolist() == [0.5, 2.0 if action == "zero" else -INF]


def test_raise_passes_through_and_leaves_no_flags_behind():
    weight, optimizer, scaler = setup(MAKERS["foreach"], on_nonfinite="raise")
    scaler.scale((weight * INF).sum()).backward()
    with pytest.raises(nanscan.NonFiniteError):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    scaler.update()
    assert scaler.get_scale() == 512.0
    optimizer.zero_grad()
    turn(weight, optimizer, scaler, [1.0, 1.0])
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("flag", [0.5, 2.0, NAN, INF])
def test_found_inf_that_is_not_exactly_one_skips_as_well(flag):
    weight, optimizer, _ = setup(MAKERS["fused AdamW"])
    weight.grad = torch.ones(2)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(flag), torch.tensor(1.0)
    optimizer.step()
    assert weight.tolist() == [1.0, 2.0]
    assert optimizer.step_was_skipped
    assert optimizer.last_report.finite, "the scaler's finding, not this gradient's"


@pytest.mark.parametrize("flag", [0.0, 0, torch.tensor(0.0), torch.tensor(0.0, dtype=torch.float64)])
def test_found_inf_of_zero_steps_whatever_its_type(flag):
    weight, optimizer, _ = setup(lambda ps: torch.optim.SGD(ps, lr=1.0))
    weight.grad = torch.ones(2)
    optimizer.found_inf, optimizer.grad_scale = flag, torch.tensor(2.0)
    optimizer.step()
    assert weight.tolist() == [0.5, 1.5]


@pytest.mark.parametrize("scale", [0.0, INF, NAN])
def test_loss_scale_that_cannot_be_divided_by_skips(scale):
    weight, optimizer, _ = setup(MAKERS["foreach"])
    weight.grad = torch.zeros(2)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(0.0), torch.tensor(scale)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert weight.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", [0.0, INF, NAN])
def test_dead_loss_scale_is_named_with_the_way_out(scale, fused):
    """A scale that sank to 0 makes every step a skip: it was called an Inf that is in no gradient."""
    weight, optimizer, scaler = setup(MAKERS["fused" if fused else "for-loop"])
    scaler.scale(weight.sum()).backward()
    scaler._scale.fill_(scale)
    with pytest.warns(nanscan.NonFiniteWarning, match=f"The loss scale itself is {scale:g}: .*new_scale=65536.0"):
        scaler.step(optimizer)
    assert optimizer.step_was_skipped
    assert "no gradient can be unscaled" in optimizer.last_report.scale_note


@unscaling
@every_maker
@pytest.mark.filterwarnings("ignore:nanscan. no gradients")
def test_step_without_any_gradient_is_a_no_op_for_the_scaler_too(make, unscale_first):
    """The scaler had recorded no check, and its update() failed for that."""
    weight, optimizer, scaler = setup(make, scale=8.0)
    scaler.scale(torch.ones(()))
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (optimizer.last_report.norm, optimizer.step_was_skipped, scaler.get_scale()) == (0.0, False, 8.0)
    scaler.scale((weight * NAN).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (optimizer.step_was_skipped, scaler.get_scale(), weight.tolist()) == (True, 4.0, [1.0, 2.0])


def test_skip_for_a_reason_outside_these_gradients_says_so():
    weight, optimizer, _ = setup(MAKERS["foreach"])
    weight.grad = torch.ones(2)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), None
    with pytest.warns(nanscan.NonFiniteWarning, match="the gradient scaler found an Inf or NaN that is not in these"):
        optimizer.step()


def test_disabled_scaler_is_a_plain_step():
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale((weight * 0.5).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.5


def test_observed_loss_is_not_divided_by_the_scale():
    weight, optimizer, scaler = setup(MAKERS["foreach"], scale=8.0)
    optimizer.observe(2.0)
    turn(weight, optimizer, scaler, [3.0, 4.0])
    assert [(row.name, row.norm) for row in optimizer.last_report.tensors] == [("p", 5.0), ("loss", 2.0)]


def test_two_optimizers_with_one_scaler():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    one, two = (nanscan.wrap(torch.optim.SGD([p], lr=1.0)) for p in (a, b))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((a * 0.5).sum() + (b * INF).sum()).backward()
    scaler.step(one)
    scaler.step(two)
    scaler.update()
    assert (a.item(), b.item()) == (0.5, 1.0)
    assert (one.step_was_skipped, two.step_was_skipped) == (False, True)
    assert scaler.get_scale() == 4.0


def test_autocast_training_with_a_fault_goes_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = nanscan.wrap(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), model, clip_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    losses = []
    for step in range(60):
        optimizer.zero_grad()
        batch = x * (INF if step in (7, 8, 30) else 1.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(batch).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert [r.step for r in optimizer.history if r.skipped] == [7, 8, 30]
    assert scaler.get_scale() == 2.0**7
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, nanscan.GradScaler])
@every_maker
def test_gradients_that_were_unscaled_through_the_inner_optimizer_are_not_unscaled_again(make, kind):
    weight, optimizer, _ = setup(make, clip_norm=100.0)
    scaler = kind("cpu", init_scale=1024.0)
    scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    scaler.unscale_(optimizer.optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (optimizer.last_report.norm, weight.grad.tolist(), scaler.get_scale()) == (5.0, [3.0, 4.0], 1024.0)
    scaler.scale((weight * torch.tensor([INF, 4.0])).sum()).backward()
    scaler.unscale_(optimizer.optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (optimizer.skipped_steps, scaler.get_scale()) == (1, 512.0)


def test_inner_optimizer_that_steps_after_its_guard_was_unscaled_is_not_unscaled_again():
    weight, optimizer, _ = setup(MAKERS["foreach"])
    scaler = nanscan.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer.optimizer)
    with pytest.raises(RuntimeError, match="step\\(\\) has already been called"):
        scaler.step(optimizer)
    assert weight.tolist() == [-2.0, -2.0]
