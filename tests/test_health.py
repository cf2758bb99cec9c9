"""One line that says how a run is doing: what it holds after each kind of step, and that any terminal can show it."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

import nanscan
from tests.guarded import NAN, make_params, set_grads

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")


def guarded(name="weight", **options):
    weight = torch.nn.Parameter(torch.ones(2))
    group = {"params": [weight], "param_names": [name]}
    return weight, nanscan.wrap(torch.optim.SGD([group], lr=0.1), **options)


def step(weight, optimizer, first=3.0, loss=None):
    weight.grad = torch.tensor([first, 4.0])
    if loss is not None:
        optimizer.observe(loss)
    optimizer.step()


def test_the_line_follows_the_run_from_before_the_first_step_to_after_a_skip():
    weight, optimizer = guarded(clip_norm=1.0)
    assert optimizer.health() == "no step yet"
    step(weight, optimizer, loss=0.5)
    assert optimizer.health() == "step 0  norm 5  loss 0.5  clipped x0.2  none skipped"
    step(weight, optimizer, NAN)
    assert optimizer.health() == "step 1  norm nan  1 skipped so far  last bad: step 1 weight"
    step(weight, optimizer, 0.0)
    assert optimizer.health() == "step 2  norm 4  clipped x0.25  1 skipped so far  last bad: step 1 weight"
    step(weight, optimizer, NAN)
    assert optimizer.health() == "step 3  norm nan  2 skipped so far  last bad: step 3 weight"


def test_a_bad_step_that_was_taken_is_named_too_and_does_not_count_as_skipped():
    weight, optimizer = guarded(on_nonfinite="zero")
    step(weight, optimizer, math.inf)
    assert optimizer.health().endswith("none skipped  last bad: step 0 weight")


def test_weights_that_went_bad_and_a_spike_are_named():
    weight, optimizer = guarded(check_params_every=1, on_nonfinite="warn")
    weight.data[0] = NAN
    step(weight, optimizer)
    assert optimizer.health().endswith("last bad: step 0 weight")
    weight, optimizer = guarded(on_spike="skip")
    for i in range(40):
        step(weight, optimizer, 3.0 + i % 2 if i < 39 else 1e6)
    assert optimizer.health().endswith("1 skipped so far  last bad: step 39 spike of the norm")


def test_several_tensors_are_one_name_and_a_count():
    params = make_params()
    optimizer = nanscan.wrap(torch.optim.SGD(params, lr=0.1))
    set_grads(params, 0, bad=NAN)
    for param in params:
        param.grad.fill_(NAN)
    optimizer.step()
    assert optimizer.health().endswith(f"last bad: step 0 group0.param0 and {len(params) - 1} more")


@pytest.mark.parametrize("name", ["größe", "a\x1b[2Jb", "line\nfeed", "[bold]x[/bold]", "層" * 80, "x" * 500 + ".end"])
def test_the_line_is_short_printable_ascii_whatever_the_name(name):
    weight, optimizer = guarded(name)
    step(weight, optimizer, NAN)
    line = optimizer.health()
    assert line.isascii() and line.isprintable() and len(line) < 140
    assert line[-4:] == name[-4:] or not name.endswith(".end")


@pytest.mark.parametrize("log", [None, "run.jsonl"])
def test_copies_and_pickles_say_the_same(log, tmp_path):
    weight, optimizer = guarded(log=log and str(tmp_path / log))
    step(weight, optimizer, NAN)
    step(weight, optimizer)
    assert optimizer.health() == "step 1  norm 5  1 skipped so far  last bad: step 0 weight"
    assert optimizer.health() == copy.deepcopy(optimizer).health() == pickle.loads(pickle.dumps(optimizer)).health()


@pytest.mark.parametrize("first", [3.0, NAN])
def test_a_loss_is_that_of_its_own_step_and_not_told_again(first):
    weight, optimizer = guarded(clip_norm=1.0)
    step(weight, optimizer, loss=0.5)
    step(weight, optimizer, first)
    assert [report.loss for report in optimizer.history] == [0.5, None]
