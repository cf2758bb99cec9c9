"""A gradient scaler used in a way that can't work says what to write instead."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import nanscan
from tests.guarded import INF, NAN

both = pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "bare"])


def setup(guarded=True, make=torch.optim.SGD, scale=8.0, **options):
    weight = nn.Parameter(torch.ones(2))
    optimizer = make([weight], lr=1.0)
    return weight, nanscan.wrap(optimizer) if guarded else optimizer, nanscan.GradScaler("cpu", scale, **options)


def backward(weight, scaler):
    scaler.scale((weight * 0.5).sum()).backward()


@both
def test_unscale_twice_says_to_call_it_once(guarded):
    weight, optimizer, scaler = setup(guarded)
    backward(weight, scaler)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"already been called .* Call it once, after the last backward"):
        scaler.unscale_(optimizer)


@both
def test_unscale_after_step_says_the_order(guarded):
    weight, optimizer, scaler = setup(guarded)
    backward(weight, scaler)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"after step.* scaler.unscale_\(optimizer\) before scaler.step"):
        scaler.unscale_(optimizer)


@both
def test_step_twice_says_to_update(guarded):
    weight, optimizer, scaler = setup(guarded)
    backward(weight, scaler)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called .*write scaler.update\(\) once"):
        scaler.step(optimizer)
    assert weight.tolist() == [0.5, 0.5]


@both
@pytest.mark.parametrize("call", ["step", "unscale_", "update"])
def test_loss_that_was_not_scaled_says_to_scale_it(guarded, call):
    weight, optimizer, scaler = setup(guarded)
    weight.sum().backward()
    with pytest.raises(RuntimeError, match=rf"{call}\(\) was called before .* scaler.scale\(loss\).backward\(\)") as e:
        getattr(scaler, call)(*([] if call == "update" else [optimizer]))
    assert isinstance(e.value, AssertionError), "what torch's scaler raises there"


@both
def test_update_without_step_says_to_step(guarded):
    weight, optimizer, scaler = setup(guarded)
    backward(weight, scaler)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"No inf checks were recorded .*scaler.step\(optimizer\) in place of"):
        scaler.update()


@both
@pytest.mark.parametrize("make", [torch.optim.SGD, lambda ps, lr: torch.optim.SGD(ps, lr=lr, fused=True)])
def test_step_without_any_gradient_hints_and_leaves_scale_and_weights(guarded, make):
    weight, optimizer, scaler = setup(guarded, make, growth_interval=1)
    scaler.scale(torch.zeros(()))
    with pytest.warns(UserWarning, match="no gradients"):
        scaler.step(optimizer)
    scaler.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(optimizer)
        scaler.update()
    assert (weight.tolist(), scaler.get_scale()) == ([1.0, 1.0], 8.0)
    backward(weight, scaler)
    scaler.step(optimizer)
    scaler.update()
    assert (weight.tolist(), scaler.get_scale()) == ([0.5, 0.5], 16.0)


@both
@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_closure_says_what_to_write(guarded, how):
    weight, optimizer, scaler = setup(guarded)
    backward(weight, scaler)
    given = ([lambda: 0.0], {}) if how == "positional" else ([], {"closure": lambda: 0.0})
    with pytest.raises(RuntimeError, match=r"closure .* scaler.scale\(loss\).backward\(\) and then scaler.step"):
        scaler.step(optimizer, *given[0], **given[1])
    scaler.step(optimizer, None)
    assert weight.tolist() == [0.5, 0.5]


@both
def test_lbfgs_says_to_train_without_a_scaler(guarded):
    weight, optimizer, scaler = setup(guarded, torch.optim.LBFGS)
    backward(weight, scaler)
    with pytest.raises(RuntimeError, match="LBFGS.* needs float32 or bfloat16 and no scaler"):
        scaler.step(optimizer)


def test_float16_gradients_say_to_keep_float32_parameters_when_unscaled_in_place():
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = nanscan.GradScaler("cpu", 8.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    backward(weight, scaler)
    with pytest.raises(ValueError, match=r"unscale FP16 gradients. Keep the parameters in float32"):
        scaler.step(optimizer)


@both
@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_copy_in_the_middle_of_a_step_says_to_update_first(guarded, take):
    weight, optimizer, scaler = setup(guarded)
    backward(weight, scaler)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"call scaler.update\(\) first"):
        take(scaler)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init_scale": 0.0}, "init_scale must be a positive, finite number, got 0.0"),
        ({"init_scale": NAN}, "init_scale must be a positive, finite number, got nan"),
        ({"init_scale": 0.5}, "init_scale=0.5 is below min_scale=1: give a larger init_scale, or min_scale=0.5"),
        ({"min_scale": -1.0}, "min_scale must be a finite number, at least 0"),
        ({"min_scale": INF}, "min_scale must be a finite number"),
        ({"hysteresis": 0}, "hysteresis must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        nanscan.GradScaler("cpu", **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA is the right default")
def test_scaler_for_cuda_where_there_is_none_is_disabled_with_a_warning_at_the_callers_line():
    with pytest.warns(
        UserWarning, match=r"CUDA is not available. Disabling. Write nanscan.GradScaler\('cpu'\)"
    ) as said:
        scaler = nanscan.GradScaler()
    assert (scaler.is_enabled(), said[0].filename, len(said)) == (False, __file__, 1)


def test_hysteresis_must_be_an_int():
    with pytest.raises(TypeError, match="hysteresis must be an int, got 1.5"):
        nanscan.GradScaler("cpu", hysteresis=1.5)


@pytest.mark.parametrize("new", [0.0, -2.0, INF, NAN, 0.25])
def test_new_scale_that_cannot_be_is_refused(new):
    weight, _, scaler = setup()
    backward(weight, scaler)
    with pytest.raises(ValueError, match="new_scale"):
        scaler.update(new)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("new", [64, 64.0, torch.tensor(64.0)])
def test_new_scale_is_taken(new):
    weight, _, scaler = setup()
    backward(weight, scaler)
    scaler.update(new)
    assert scaler.get_scale() == 64.0


def test_empty_state_is_refused():
    with pytest.raises(RuntimeError, match="state dict is empty"):
        nanscan.GradScaler("cpu").load_state_dict({})


def train_clipping_the_scaled_gradients(optimizer, params, scaler, steps=8, unscale=False):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sum((p * torch.randn(p.shape, generator=generator)).sum() for p in params)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()


@both
def test_clipping_before_unscaling_is_said_once(guarded):
    params = [nn.Parameter(torch.randn(5)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer = nanscan.wrap(optimizer) if guarded else optimizer
    with pytest.warns(
        nanscan.NonFiniteWarning, match=r"\*scaled\* gradients was 1 in .*nanscan.wrap\(.*clip_norm"
    ) as w:
        train_clipping_the_scaled_gradients(optimizer, params, nanscan.GradScaler("cpu"), steps=20)
    assert len(w) == 1


@both
def test_clipping_after_unscaling_is_no_matter_for_a_word(guarded):
    params = [nn.Parameter(torch.randn(5)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer = nanscan.wrap(optimizer) if guarded else optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_clipping_the_scaled_gradients(optimizer, params, nanscan.GradScaler("cpu"), steps=20, unscale=True)
