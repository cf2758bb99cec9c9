"""One step: what is done about a NaN, what is left untouched, what is said."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn

import nanscan
from nanscan.errors import NonFiniteWarning
from tests.guarded import INF, NAN, bits, make_params, one, set_grads, step, whole_state

pytestmark = pytest.mark.usefixtures("either_way_of_clipping")

quiet = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")


# ---- what to do about a NaN ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["stop", "SKIP", None, 3])
def test_unknown_action_is_refused_with_the_valid_ones(value):
    expected = f"on_nonfinite must be 'skip', 'raise', 'zero', 'warn' or a function of the report, got {value!r}"
    with pytest.raises(ValueError) as error:
        one(on_nonfinite=value)
    assert str(error.value) == expected


@quiet
@pytest.mark.parametrize("action", ["skip", "raise", "zero", "warn"])
def test_function_decides_with_the_report_in_hand(action):
    reports = []

    def decide(report):
        reports.append((report, report.bad[0].name, report.step))
        return action

    weight, optimizer = one([1.0, 1.0], on_nonfinite=decide)
    step(optimizer, weight, [1.0, 1.0])
    assert reports == [], "a healthy step asks nobody"
    if action == "raise":
        with pytest.raises(nanscan.NonFiniteError):
            step(optimizer, weight, [NAN, 1.0])
    else:
        step(optimizer, weight, [NAN, 1.0])
    assert [(name, at) for _, name, at in reports] == [("group0.param0", 1)]
    assert reports[0][0] is optimizer.last_report
    assert optimizer.last_report.action == action
    assert optimizer.step_was_skipped == (action in ("skip", "raise"))


def test_function_that_returns_nonsense_is_an_error_and_nothing_is_touched():
    weight, optimizer = one([1.0], on_nonfinite=lambda report: "maybe")
    with pytest.raises(ValueError, match="must return 'skip', 'raise', 'zero', 'warn', it returned 'maybe'"):
        step(optimizer, weight, [NAN])
    assert weight.tolist() == [1.0]
    assert torch.isnan(weight.grad).all()


@quiet
def test_raise_says_who_where_and_how_many_and_carries_the_report():
    model = nn.Linear(2, 2)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model, on_nonfinite="raise")
    model.weight.grad = torch.tensor([[1.0, INF], [NAN, 1.0]])
    model.bias.grad = torch.zeros(2)
    with pytest.raises(nanscan.NonFiniteError) as error:
        optimizer.step()
    assert str(error.value) == (
        "nanscan: step 0 not taken: grad of 'weight' has 1 NaN, 1 Inf of 4 (first at [0, 1]). Weights and optimizer "
        "state are unchanged, the gradients are left for inspection."
    )
    assert error.value.report is optimizer.last_report
    assert optimizer.skipped_steps == optimizer.consecutive_skips == 1
    assert isinstance(error.value, RuntimeError)


# ---- skips, runs of skips --------------------------------------------------------------------------------------------


def test_each_run_of_skips_is_warned_about_once_at_the_callers_line():
    weight, optimizer = one([1.0])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for grad in (1.0, NAN, NAN, NAN, 1.0, NAN, NAN):
            weight.grad = torch.tensor([grad])
            optimizer.step()
    assert [str(w.message).split(":")[1] for w in seen] == [" step 1 skipped", " step 5 skipped"]
    assert {w.category for w in seen} == {NonFiniteWarning}
    assert {w.filename for w in seen} == {__file__}
    assert optimizer.skipped_steps == 5
    assert optimizer.consecutive_skips == 2
    assert optimizer.first_skipped_step == 1
    assert [r.skipped for r in optimizer.history] == [False, True, True, True, False, True, True]


def test_warning_of_a_skip_word_for_word():
    model = nn.Linear(2, 1)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model)
    model.weight.grad, model.bias.grad = torch.tensor([[1.0, NAN]]), torch.tensor([INF])
    with pytest.warns(NonFiniteWarning) as seen:
        optimizer.step()
    assert str(seen[0].message) == (
        "nanscan: step 0 skipped: grad of 'weight' has 1 NaN, 0 Inf of 2 (first at [0, 1]); grad of 'bias' has 0 NaN, "
        "1 Inf of 1 (first at [0]). Weights and optimizer state are unchanged, the gradients are cleared."
    )


def test_repeat_offender_is_said_when_it_is_one():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    named = [("encoder.in", a), ("decoder.out.bias", b)]
    optimizer = nanscan.wrap(torch.optim.SGD(named, lr=1.0))
    said = []
    for grads in ((NAN, NAN), (1.0, 1.0), (1.0, INF), (1.0, 1.0), (1.0, NAN), (1.0, 1.0), (NAN, 1.0)):
        a.grad, b.grad = torch.tensor([grads[0]]), torch.tensor([grads[1]])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
        said += ["Last 3 skipped steps: always decoder.out.bias." in str(w.message) for w in seen]
    assert said == [False, False, True, False]


@quiet
def test_training_diverged_comes_with_the_skip_that_fills_the_count():
    weight, optimizer = one([1.0], max_consecutive_skips=3)
    step(optimizer, weight, [NAN])
    step(optimizer, weight, [0.5])
    step(optimizer, weight, [NAN])
    step(optimizer, weight, [NAN])
    with pytest.raises(nanscan.TrainingDiverged) as error:
        step(optimizer, weight, [NAN])
    assert optimizer.consecutive_skips == 3
    assert error.value.report is optimizer.last_report
    assert "Last 3 skipped steps: always group0.param0." in str(error.value)
    assert "That makes 3 skipped steps in a row (since step 2)" in str(error.value)
    assert isinstance(error.value, nanscan.NonFiniteError)
    assert weight.tolist() == [0.5]
    assert weight.grad is None


@quiet
def test_max_consecutive_skips_of_one_and_of_none():
    weight, optimizer = one([1.0], max_consecutive_skips=1)
    with pytest.raises(nanscan.TrainingDiverged):
        step(optimizer, weight, [NAN])
    weight, optimizer = one([1.0], max_consecutive_skips=None)
    for _ in range(60):
        step(optimizer, weight, [NAN])
    assert optimizer.consecutive_skips == 60


@quiet
def test_skip_clears_the_gradients_of_every_group_and_accumulation_recovers():
    params = make_params()
    optimizer = nanscan.wrap(torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1))
    set_grads(params, 0, bad=NAN)
    optimizer.step()
    assert [p.grad for p in params] == [None] * 3


@quiet
def test_frozen_parameter_and_parameter_without_gradient_are_left_alone():
    frozen, unused, used = (nn.Parameter(torch.ones(1)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = nanscan.wrap(torch.optim.SGD([frozen, unused, used], lr=1.0))
    step(optimizer, used, [0.25])
    assert [p.item() for p in (frozen, unused, used)] == [1.0, 1.0, 0.75]
    assert [row.name for row in optimizer.last_report.tensors] == ["group0.param2"]
    step(optimizer, used, [NAN])
    assert [row.name for row in optimizer.last_report.bad] == ["group0.param2"]


def test_no_gradient_at_all_is_stepped_through_and_hinted_at_once():
    weight, optimizer = one([1.0])
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    assert [str(w.message).split(":")[1] for w in seen] == [" no gradients at step 0"]
    assert len(called) == 2
    report = optimizer.last_report
    assert (report.norm, report.finite, report.skipped, report.numel) == (0.0, True, False, 0)


def test_gradient_of_zeros_is_an_ordinary_step():
    weight, optimizer = one([1.0], inner={"weight_decay": 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(optimizer, weight, [0.0])
    assert weight.item() == 0.5
    assert optimizer.last_report.norm == 0.0


def test_unreadable_gradient_is_named():
    weight = nn.Parameter(torch.zeros(1, device="meta"))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.zeros(1, device="meta")
    with pytest.raises(ValueError, match=r"^grad of 'group0.param0' is a meta or fake tensor"):
        optimizer.step()


# ---- many at once ----------------------------------------------------------------------------------------------------


@quiet
def test_two_guarded_optimizers_in_two_threads_do_not_mix():
    results = {}

    def train(name, bad_every):
        params = make_params(seed=len(name))
        optimizer = nanscan.wrap(torch.optim.AdamW(params, lr=0.01), clip_norm=1.0)
        for i in range(300):
            set_grads(params, i, bad=NAN if i % bad_every == 0 else None)
            optimizer.step()
        results[name] = (optimizer.skipped_steps, len(optimizer.history), whole_state(params, optimizer))

    for name, bad_every in (("a", 7), ("bb", 3)):
        train(name, bad_every)
    alone = dict(results)
    threads = [threading.Thread(target=train, args=pair) for pair in (("a", 7), ("bb", 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == alone
    assert alone["a"][0] == 43
    assert alone["bb"][0] == 100


def test_step_of_the_inner_optimizer_that_fails_is_no_step():
    weight, optimizer = one([1.0])

    def fail(*_):
        raise OSError("hook failed")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="hook failed"):
        step(optimizer, weight, [1.0])
    handle.remove()
    assert len(optimizer.history) == 0
    step(optimizer, weight, [1.0])
    assert [r.step for r in optimizer.history] == [0]


def test_mixed_dtypes_in_one_optimizer():
    half, double = nn.Parameter(torch.zeros(2, dtype=torch.float16)), nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = nanscan.wrap(torch.optim.SGD([half, double], lr=1.0), clip_norm=1.0)
    half.grad, double.grad = torch.tensor([300.0, 0.0], dtype=torch.float16), torch.tensor([400.0], dtype=torch.float64)
    optimizer.step()
    assert optimizer.last_report.norm == 500.0
    assert half.tolist() == pytest.approx([-0.6, 0.0], rel=1e-3)
    assert double.item() == pytest.approx(-0.8)
    assert [row.dtype for row in optimizer.last_report.tensors] == ["float16", "float64"]


def test_groups_on_different_devices_are_not_left_to_one_device():
    here, elsewhere = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = nanscan.wrap(torch.optim.SGD([{"params": [here]}, {"params": [elsewhere]}], lr=1.0, momentum=0.9))
    optimizer._deferred = True
    optimizer._replan()
    here.grad = torch.ones(2)
    assert not optimizer._can_defer()
    optimizer.step()
    assert here.tolist() == [-1.0, -1.0]


def test_short_way_is_taken_where_all_lies_on_the_cpu_whatever_pytorch_was_built_for():
    weight, optimizer = one([1.0])
    optimizer._deferred = None  # as where it was built for CUDA
    optimizer._replan()
    assert not optimizer._plain
    step(optimizer, weight, [1.0])
    assert optimizer._plain
    step(optimizer, weight, [2.0])
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, device="meta"))]})
    step(optimizer, weight, [3.0])
    assert not optimizer._plain, "a device may have to decide: each step asks"
    assert [r.norm for r in optimizer.history] == [1.0, 2.0, 3.0]
    assert [r.step for r in optimizer.history] == [0, 1, 2]


def test_report_bits_do_not_depend_on_the_report_being_read():
    weight, optimizer = one([1.0, 2.0])
    step(optimizer, weight, [3.0, 4.0])
    first = optimizer.last_report
    assert first is optimizer.last_report is optimizer.history[-1]
    step(optimizer, weight, [6.0, 8.0])
    assert (first.norm, first.tensors[0].norm, bits(weight)) == (5.0, 5.0, bits(torch.tensor([-8.0, -10.0])))
