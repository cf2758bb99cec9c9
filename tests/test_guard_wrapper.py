"""The guarded optimizer as an object: what shows through, copies, hooks, options."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook

import nanscan
from nanscan import AdaptiveClip
from nanscan.errors import NonFiniteWarning
from tests.guarded import NAN, bits, make_params, set_grads, whole_state

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.errors.NonFiniteWarning")


def trained(steps=3, bad_at=(1,), make=torch.optim.AdamW, **options):
    params = make_params()
    optimizer = nanscan.wrap(make(params, lr=0.1), **options)
    train(params, optimizer, range(steps), bad_at)
    return params, optimizer


def train(params, optimizer, steps, bad_at=()):
    for i in steps:
        set_grads(params, i, bad=NAN if i in bad_at else None)
        optimizer.step()


# ---- the inner optimizer shows through -------------------------------------------------------------------------------


def test_it_is_an_optimizer_that_holds_the_inner_one():
    inner = torch.optim.SGD(make_params(), lr=0.1)
    optimizer = nanscan.wrap(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, nanscan.GuardedOptimizer)
    assert optimizer.optimizer is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults


def test_groups_and_state_stay_the_live_ones_after_loading():
    params, optimizer = trained(make=lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    train(params, optimizer, [3])
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.05


def test_loading_into_the_inner_optimizer_is_seen_as_well():
    params, optimizer = trained()
    optimizer.optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    train(params, optimizer, [3])
    assert not optimizer.step_was_skipped


def test_assigning_groups_state_and_defaults_reaches_the_inner_optimizer():
    _, optimizer = trained()
    groups = [dict(optimizer.param_groups[0], lr=7.0)]
    optimizer.param_groups, optimizer.state, optimizer.defaults = groups, {}, {"lr": 7.0}
    assert optimizer.optimizer.param_groups is groups
    assert optimizer.optimizer.state == {}
    assert optimizer.optimizer.defaults == {"lr": 7.0}


def test_attributes_it_does_not_know_come_from_the_inner_optimizer():
    class Custom(torch.optim.SGD):
        def custom(self):
            return "custom"

    optimizer = nanscan.wrap(Custom(make_params(), lr=0.1))
    assert optimizer.custom() == "custom"
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing
    assert not hasattr(optimizer, "found_inf")


def test_method_that_changes_weights_and_is_no_step_is_not_guarded_and_that_is_said():
    class TwoCalls(torch.optim.SGD):
        def first_step(self, zero_grad=False):
            return "perturbed"

    optimizer = nanscan.wrap(TwoCalls(make_params(), lr=0.1))
    with pytest.warns(
        UserWarning, match=r"first_step\(\) is the inner optimizer's own .* write optimizer.step\(closure\)"
    ):
        assert optimizer.first_step(zero_grad=True) == "perturbed"


@pytest.mark.parametrize("through", ["wrapper", "inner"])
def test_group_added_later_is_scanned_and_named(through):
    model = nn.ModuleDict({"old": nn.Linear(2, 1), "new": nn.Linear(2, 1)})
    optimizer = nanscan.wrap(torch.optim.SGD(model["old"].parameters(), lr=1.0), model)
    model["old"].bias.grad = torch.ones(1)
    optimizer.step()
    target = optimizer if through == "wrapper" else optimizer.optimizer
    target.add_param_group({"params": model["new"].parameters()})
    assert len(optimizer.param_groups) == len(optimizer.optimizer.param_groups) == 2
    model["new"].bias.grad = torch.tensor([NAN])
    optimizer.step()
    assert [row.name for row in optimizer.last_report.bad] == ["new.bias"]


def test_parameter_replaced_in_place_is_scanned_and_described_anew():
    weight, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(5))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["params"][0] = other
    other.grad = torch.full((5,), NAN)
    optimizer.step()
    assert [(row.shape, row.nan_count) for row in optimizer.last_report.bad] == [((5,), 5)]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_is_the_inner_ones(set_to_none):
    params, optimizer = trained()
    set_grads(params, 0)
    optimizer.zero_grad(set_to_none=set_to_none)
    assert [p.grad is None for p in params] == [set_to_none] * 3
    assert set_to_none or all(not p.grad.any() for p in params)


def test_a_run_with_zero_grad_false_recovers_after_a_skip():
    weight = nn.Parameter(torch.ones(1))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=0.1))
    for x in (1.0, NAN, 1.0, 1.0):
        optimizer.zero_grad(set_to_none=False)
        (weight * x).sum().backward()
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert weight.item() == pytest.approx(0.7)


def test_repr_shows_the_inner_optimizer_and_the_options():
    _, optimizer = trained(clip_norm=0.5)
    assert "AdamW" in repr(optimizer)
    assert "clip_norm=0.5" in repr(optimizer)


# ---- hooks -----------------------------------------------------------------------------------------------------------


def test_step_hooks_fire_once_per_real_step_and_never_on_a_skipped_one():
    params = make_params()
    optimizer = nanscan.wrap(torch.optim.SGD(params, lr=0.1))
    called = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: called.append(("pre", opt)))
    optimizer.optimizer.register_step_post_hook(lambda opt, args, kwargs: called.append(("post", opt)))
    train(params, optimizer, range(3), bad_at=[1])
    assert called == [("pre", optimizer.optimizer), ("post", optimizer.optimizer)] * 2


def test_hooks_common_to_all_optimizers_fire_once_too():
    params = make_params()
    optimizer = nanscan.wrap(torch.optim.SGD(params, lr=0.1))
    called = []
    handle = register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        train(params, optimizer, range(3), bad_at=[1])
    finally:
        handle.remove()
    assert len(called) == 2


def test_removed_hook_is_gone():
    params = make_params()
    optimizer = nanscan.wrap(torch.optim.SGD(params, lr=0.1))
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1)).remove()
    train(params, optimizer, [0])
    assert called == []


def test_state_dict_hooks_run_once():
    _, optimizer = trained()
    called = []
    optimizer.register_state_dict_pre_hook(lambda opt: called.append("pre"))
    optimizer.register_state_dict_post_hook(lambda opt, state: called.append("post"))
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: called.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda opt: called.append("load post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["pre", "post", "load pre", "load post"]


# ---- state dicts and copies ------------------------------------------------------------------------------------------


def test_state_dict_is_the_inner_ones_and_loads_with_and_without_nanscan():
    params, optimizer = trained()
    state = optimizer.state_dict()
    assert bits(state) == bits(optimizer.optimizer.state_dict())
    assert state.keys() == {"state", "param_groups"}
    bare = torch.optim.AdamW(make_params(), lr=9.0)
    bare.load_state_dict(state)
    assert bits(bare.state_dict()) == bits(state)
    again = nanscan.wrap(torch.optim.AdamW(make_params(), lr=9.0))
    again.load_state_dict(bare.state_dict())
    assert bits(again.state_dict()) == bits(state)


def test_torch_save_of_the_state_dict_round_trips_with_weights_only():
    params, optimizer = trained()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert bits(torch.load(file, weights_only=True)) == bits(optimizer.state_dict())


@pytest.mark.parametrize("options", [{}, {"log": lambda report: None}], ids=["plain", "other"])
def test_step_with_zeros_by_which_pytorch_makes_a_state_to_load_is_none_of_the_run(options):
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = nanscan.wrap(torch.optim.AdamW(model.parameters()), model, **options)
    _, state = get_state_dict(model, optimizer)  # makes one
    resumed = nanscan.wrap(torch.optim.AdamW(other.parameters()), other, clip_norm=AdaptiveClip(), **options)
    set_state_dict(other, resumed, model_state_dict=model.state_dict(), optim_state_dict=state)
    assert (optimizer.last_report, len(resumed.history)) == (None, 0)
    other(torch.ones(1, 2)).sum().backward()
    resumed.step()
    assert (resumed.last_report.step, resumed.state_dict()["state"][0]["step"].item()) == (0, 2.0)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_have_counters_options_history_and_names_and_train_on_alone(clone):
    model = nn.Linear(3, 2)
    params = list(model.parameters())
    optimizer = nanscan.wrap(torch.optim.AdamW(params, lr=0.1), model, clip_norm=0.5, history=5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # patches step() with a local function
    train(params, optimizer, range(4), bad_at=[2])
    twin = clone(optimizer)
    assert isinstance(twin, nanscan.GuardedOptimizer)
    assert twin.policy == optimizer.policy
    assert (twin.skipped_steps, twin.first_skipped_step, twin.consecutive_skips) == (1, 2, 0)
    assert [r.to_json(tensors=False) for r in twin.history] == [r.to_json(tensors=False) for r in optimizer.history]
    own = [p for g in twin.param_groups for p in g["params"]]
    assert all(a is not b for a, b in zip(own, params, strict=True))
    assert whole_state(own, twin) == whole_state(params, optimizer)
    before = bits(params)
    train(own, twin, range(4, 7), bad_at=[5])
    assert bits(params) == before
    assert [row.name for row in twin.history[-2].bad] == ["bias"]
    assert [r.step for r in twin.history] == [2, 3, 4, 5, 6]
    assert optimizer.skipped_steps == 1


def test_deepcopy_of_model_and_optimizer_together_keeps_them_together():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert twin.model is twin_model
    assert twin.param_groups[0]["params"][0] is twin_model[0].weight
    alone = copy.deepcopy(optimizer)
    assert alone.model is None


def test_pickled_optimizer_gets_its_model_back_by_wrapping_again():
    model = nn.Linear(2, 1)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    new_model, new = pickle.loads(pickle.dumps((model, optimizer)))
    assert new.model is None
    assert nanscan.wrap(new, new_model) is new
    assert new.model is new_model


def test_attribute_that_can_be_pickled_but_not_copied_does_not_stop_a_deep_copy():
    weight = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], lr=0.1)
    inner.last_loss, inner.note = (weight * 2).sum(), "kept"  # a loss with its graph
    copied = copy.deepcopy(nanscan.wrap(inner))
    assert copied.optimizer.note == "kept"
    assert not hasattr(copied.optimizer, "last_loss")


def test_pickle_before_the_first_step_works():
    twin = pickle.loads(pickle.dumps(nanscan.wrap(torch.optim.SGD(make_params(), lr=0.1))))
    assert twin.last_report is None
    assert len(twin.history) == 0


# ---- wrapping --------------------------------------------------------------------------------------------------------


def test_wrapping_twice_gives_the_same_object_and_updates_the_options_given():
    params, optimizer = trained(clip_norm=0.5, on_nonfinite="skip", history=8)
    again = nanscan.wrap(optimizer, clip_value=3.0, history=2)
    assert again is optimizer
    assert isinstance(optimizer.optimizer, torch.optim.AdamW)
    policy = optimizer.policy
    assert (policy.clip_norm, policy.clip_value, policy.on_nonfinite, policy.history) == (0.5, 3.0, "skip", 2)
    assert optimizer.skipped_steps == 1
    assert [r.step for r in optimizer.history] == [1, 2]
    for p in params:
        p.grad = torch.full_like(p, 100.0)
    optimizer.step()
    assert all(p.grad.abs().max() <= 3.0 for p in params)


@pytest.mark.parametrize(
    "arguments, options, error, text",
    [
        ((nn.Linear(1, 1),), {}, TypeError, "optimizer must be a torch.optim.Optimizer, got Linear"),
        ((None, "model"), {}, TypeError, "model must be a torch.nn.Module or None, got str"),
        (
            (),
            {"max_consecutive_skips": 0},
            ValueError,
            "max_consecutive_skips must be at least 1 or None (never give up)",
        ),
        ((), {"max_consecutive_skips": 2.0}, TypeError, "max_consecutive_skips must be an int, got 2.0"),
        ((), {"check_params_every": -1}, ValueError, "check_params_every must be at least 0 (0 = never), got -1"),
        ((), {"history": -1}, ValueError, "history must be at least 0, got -1"),
        ((), {"log": 3}, TypeError, "log must be a path or a function of the StepReport, got 3"),
        ((), {"find_origin": True}, ValueError, "find_origin=True needs the model"),
        ((), {"process_group": object()}, TypeError, "process_group must be a torch.distributed.ProcessGroup"),
    ],
)
def test_wrong_arguments_are_explained(arguments, options, error, text):
    sgd = torch.optim.SGD(make_params(), lr=0.1)
    arguments = (sgd,) if not arguments else (arguments[0] or sgd, *arguments[1:])
    with pytest.raises(error) as caught:
        nanscan.wrap(*arguments, **options)
    assert text in str(caught.value)


def test_third_party_optimizer_is_guarded_like_any_other():
    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-2):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None, scale=1.0):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["m"] = state.get("m", torch.zeros_like(p)) * 0.9 + p.grad * 0.1
                    p.add_(state["m"].sign(), alpha=-group["lr"] * scale)

    params, optimizer = trained(bad_at=(), make=Lion)
    before = whole_state(params, optimizer)
    train(params, optimizer, [3], bad_at=[3])
    assert whole_state(params, optimizer) == before
    set_grads(params, 4)
    moved = bits(params)
    optimizer.step(scale=0.0)
    assert bits(params) == moved, "keyword arguments of step() reach the inner optimizer"


def test_history_of_size_zero_still_has_the_last_report():
    _, optimizer = trained(history=0)
    assert len(optimizer.history) == 0
    assert optimizer.last_report.step == 2


def test_failing_function_given_as_log_is_not_hidden():
    def log(report):
        raise ValueError("my log failed")

    params = make_params()
    optimizer = nanscan.wrap(torch.optim.SGD(params, lr=0.1), log=log)
    set_grads(params, 0)
    with pytest.raises(ValueError, match="my log failed"):
        optimizer.step()


def test_function_given_as_log_gets_every_report_once():
    reports = []
    params, optimizer = trained(log=reports.append)
    assert [r.step for r in reports] == [0, 1, 2]
    assert [r.skipped for r in reports] == [False, True, False]
    assert reports[-1] is optimizer.last_report is optimizer.history[-1]


def test_warnings_can_be_turned_into_errors():
    params = make_params()
    optimizer = nanscan.wrap(torch.optim.SGD(params, lr=0.1))
    set_grads(params, 0, bad=NAN)
    with pytest.warns(NonFiniteWarning):
        optimizer.step()


def test_works_inside_torch_optim_swa_utils_and_zero_redundancy_style_iteration():
    params, optimizer = trained()
    assert [p for group in optimizer.param_groups for p in group["params"]] == params
    swa = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
    train(params, optimizer, [3])
    swa.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
