"""Loading an optimizer's state by the parameters' names: reordered, regrouped, with its precision, all or nothing."""

from __future__ import annotations

import copy
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanscan
from nanscan import CheckpointError, CheckpointWarning
from nanscan.matching import load_optimizer_state, optimizer_names
from tests.guarded import STEPPING, Variant, bits, make_params, set_grads

SHAPES = {"a": (4, 3), "b": (3, 4), "c": (5, 5), "d": (6, 6)}


class Holder(nn.Module):
    """Parameters in the order given; their values and gradients depend on the name alone."""

    def __init__(self, order: str = "abcd", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name in order:
            self.register_parameter(name, nn.Parameter(_random(name, 0).to(dtype)))

    def train_once(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        for name, param in self.named_parameters():
            param.grad = _random(name[-1], step + 1).to(param.dtype)
        optimizer.step()

    def values(self) -> Any:
        return bits({name: p.detach() for name, p in sorted(self.named_parameters())})


def _random(name: str, step: int) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * step + ord(name)))


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False, **options)


def trained(order: str = "abcd", steps: int = 3) -> tuple[Holder, torch.optim.Optimizer]:
    model = Holder(order)
    optimizer = adam(model)
    for step in range(steps):
        model.train_once(optimizer, step)
    return model, optimizer


def continued(model: Holder, optimizer: torch.optim.Optimizer) -> Any:
    for step in range(3, 6):
        model.train_once(optimizer, step)
    return model.values()


def with_weights_of(source: Holder, order: str) -> Holder:
    target = Holder(order)
    target.load_state_dict(source.state_dict())
    return target


def test_a_reordered_model_continues_bit_for_bit() -> None:
    model, optimizer = trained()
    saved, names = copy.deepcopy(optimizer.state_dict()), optimizer_names(optimizer, model)
    other = with_weights_of(model, "dbca")
    new = adam(other)
    report = load_optimizer_state(new, saved, model=other, names=names)
    assert report.complete and report.loaded == ("d", "b", "c", "a")
    assert continued(other, new) == continued(model, optimizer)


def test_names_in_the_groups_are_used_where_none_were_stored() -> None:
    model = Holder()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    model.train_once(optimizer, 0)
    other = Holder("cabd")
    new = torch.optim.SGD(other.named_parameters(), lr=0.5, momentum=0.1)
    load_optimizer_state(new, optimizer.state_dict())
    for name, param in other.named_parameters():
        assert torch.equal(
            new.state[param]["momentum_buffer"], optimizer.state[getattr(model, name)]["momentum_buffer"]
        )
    assert new.param_groups[0]["param_names"] == ["c", "a", "b", "d"] and new.param_groups[0]["lr"] == 0.1


def test_parameters_in_other_groups_bring_their_state_and_options() -> None:
    model = Holder()
    optimizer = torch.optim.SGD(
        [{"params": [model.a, model.b], "lr": 0.1}, {"params": [model.c, model.d], "lr": 0.2}], momentum=0.9
    )
    model.train_once(optimizer, 0)
    saved, names = optimizer.state_dict(), optimizer_names(optimizer, model)
    new = torch.optim.SGD([{"params": [model.d]}, {"params": [model.a]}, {"params": [model.c, model.b]}], lr=1.0)
    with pytest.warns(CheckpointWarning, match=r"group 2 was several groups with different lr \(0.[12], 0.[12]\)"):
        report = load_optimizer_state(new, saved, model=model, names=names)
    assert [group["lr"] for group in new.param_groups[:2]] == [0.2, 0.1] and report.complete
    assert all(group["momentum"] == 0.9 for group in new.param_groups)
    assert torch.equal(new.state[model.b]["momentum_buffer"], optimizer.state[model.b]["momentum_buffer"])


def test_groups_that_were_one_and_lose_their_difference_are_told() -> None:
    model = Holder()
    optimizer = torch.optim.AdamW(list(model.parameters()), weight_decay=0.01)
    model.train_once(optimizer, 0)
    saved, names = optimizer.state_dict(), optimizer_names(optimizer, model)
    decayed, free = {"params": [model.a, model.b], "weight_decay": 0.1}, {"params": [model.c, model.d]}
    new = torch.optim.AdamW([decayed, {**free, "weight_decay": 0.0}])
    with pytest.warns(CheckpointWarning, match=r"groups 0, 1 were one .* weight_decay \(0.01\); made with 0.1, 0.0"):
        assert load_optimizer_state(new, saved, model=model, names=names).complete
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_optimizer_state(
            torch.optim.AdamW([decayed, {**free, "weight_decay": 0.1}]), saved, model=model, names=names
        )


def test_wrapped_models_and_prefixed_names_match() -> None:
    model, optimizer = trained()
    saved, names = optimizer.state_dict(), [[f"module._orig_mod.{name}" for name in "abcd"]]
    other = with_weights_of(model, "abcd")
    new = adam(other)
    report = load_optimizer_state(new, saved, model=nn.DataParallel(other), names=names)
    assert report.adapted[0] == ("module._orig_mod.a", "a") and len(report.adapted) == 4
    assert continued(other, new) == continued(model, optimizer)


def test_a_guarded_optimizer_knows_its_names() -> None:
    model, optimizer = trained()
    guarded = nanscan.wrap(optimizer, model)
    assert optimizer_names(guarded) == [["a", "b", "c", "d"]] == optimizer_names(copy.deepcopy(guarded))
    saved, names = guarded.state_dict(), optimizer_names(guarded)
    other = with_weights_of(model, "dcba")
    new = nanscan.wrap(adam(other), other)
    load_optimizer_state(new, saved, names=names)
    assert new.param_groups is new.optimizer.param_groups and new.state is new.optimizer.state
    assert continued(other, new) == continued(model, optimizer)


def test_added_and_frozen_parameters_are_named_and_nothing_is_changed() -> None:
    model, optimizer = trained("abc")
    saved, names = optimizer.state_dict(), optimizer_names(optimizer, model)
    other = Holder("bcd")
    new = adam(other)
    other.train_once(new, 9)
    before = bits(new.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_optimizer_state(new, saved, model=other, names=names)
    assert "missing in the checkpoint (1): 'd'" in str(caught.value)
    assert "not in the optimizer (1): 'a'" in str(caught.value)
    assert bits(new.state_dict()) == before
    with pytest.warns(CheckpointWarning, match="'d'.*'a'"):
        report = load_optimizer_state(new, saved, model=other, names=names, strict=False)
    assert report.loaded == ("b", "c") and report.missing == ("d",) and report.unexpected == ("a",)
    assert torch.equal(new.state[other.b]["exp_avg"], optimizer.state[model.b]["exp_avg"])
    assert bits(new.state_dict()["state"][2]) == before["state"][2]  # 'd' keeps what it had


def test_state_of_another_shape_is_refused_although_torch_takes_it() -> None:
    model, optimizer = trained("ab")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.zeros(9)
    new = adam(model)
    before = bits(new.state_dict())
    with pytest.raises(
        CheckpointError, match=r"'a' has a saved exp_avg of shape \(9,\), the parameter's shape is \(4, 3\)"
    ):
        load_optimizer_state(new, saved, model=model, names=[["a", "b"]])
    assert bits(new.state_dict()) == before
    with pytest.warns(CheckpointWarning, match="'a' has a saved exp_avg"):
        report = load_optimizer_state(new, saved, model=model, names=[["a", "b"]], strict=False)
    assert report.loaded == ("b",) and model.a not in new.state


def test_by_position_swapped_parameters_are_found_by_their_shapes() -> None:
    _, optimizer = trained("ab")
    other = Holder("ba")
    with pytest.raises(CheckpointError, match="'group0.param0' has a saved exp_avg of shape"):
        load_optimizer_state(adam(other), optimizer.state_dict())


def test_by_position_another_number_of_parameters_says_how_to_give_names() -> None:
    _, optimizer = trained("ab")
    with pytest.raises(CheckpointError, match=r"1 group of 2 parameters, the optimizer 1 group of 3.*optimizer_names"):
        load_optimizer_state(adam(Holder("abc")), optimizer.state_dict(), strict=False)


def test_a_model_without_the_optimizers_parameters_is_refused() -> None:
    model, optimizer = trained("ab")
    with pytest.raises(CheckpointError, match="the Holder given as model= has none of the optimizer's parameters"):
        load_optimizer_state(optimizer, optimizer.state_dict(), model=Holder("ab"), names=[["a", "b"]])


def test_master_weights_that_no_model_has_are_matched_by_position() -> None:
    model, optimizer = trained("ab")
    masters = [nn.Parameter(p.detach().double()) for p in model.parameters()]
    new = torch.optim.AdamW(masters, lr=0.5)
    assert optimizer_names(new, model) == [["group0.param0", "group0.param1"]]
    load_optimizer_state(new, optimizer.state_dict(), model=model, names=optimizer_names(new, model))
    assert torch.equal(new.state[masters[1]]["exp_avg"], optimizer.state[model.b]["exp_avg"])


def test_names_that_do_not_fit_the_state_are_refused() -> None:
    model, optimizer = trained("ab")
    with pytest.raises(CheckpointError, match=r"names for groups of \[1\] parameters, the state has groups of \[2\]"):
        load_optimizer_state(optimizer, optimizer.state_dict(), model=model, names=[["a"]])


@pytest.mark.parametrize("fused", [False, True])
def test_precision_of_the_state_is_kept_bit_for_bit(fused: bool) -> None:
    model = Holder("ab", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    model.train_once(optimizer, 0)
    for state in optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = torch.randn(state["exp_avg"].shape), state["exp_avg_sq"].double()
    saved = optimizer.state_dict()
    new = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    load_optimizer_state(new, saved, model=model, names=[["a", "b"]])
    assert bits(new.state_dict()) == bits(saved)
    step = new.state[model.a]["step"]
    assert step.dtype == torch.float32 and step.device.type == "cpu"


@pytest.mark.parametrize(("now", "wanted"), [(torch.float32, torch.float32), (torch.float16, torch.float16)])
def test_without_the_former_dtypes_narrower_state_follows_its_parameter(now: torch.dtype, wanted: torch.dtype) -> None:
    model = Holder("ab", torch.bfloat16)
    optimizer = adam(model)
    model.train_once(optimizer, 0)
    new = Holder("ab", now)
    resumed = adam(new)
    load_optimizer_state(resumed, optimizer.state_dict(), model=new, names=[["a", "b"]])
    for key in ("exp_avg", "exp_avg_sq"):
        assert bits(resumed.state[new.a][key]) == bits(optimizer.state[model.a][key].to(wanted))
    resumed.state[new.a]["exp_avg"] = resumed.state[new.a]["exp_avg"].double()
    again = adam(new)
    load_optimizer_state(again, resumed.state_dict(), model=new, names=[["a", "b"]])
    assert again.state[new.a]["exp_avg"].dtype == torch.float64


def test_the_callers_state_is_neither_shared_nor_changed() -> None:
    model, optimizer = trained("ab")
    saved = copy.deepcopy(optimizer.state_dict())
    before = bits(saved)
    new = adam(model)
    load_optimizer_state(new, saved, model=model, names=[["a", "b"]])
    model.train_once(new, 7)
    new.param_groups[0]["lr"] = 9.0
    assert bits(saved) == before


@pytest.mark.parametrize("variant", STEPPING, ids=str)
def test_every_optimizer_continues_bit_for_bit(variant: Variant) -> None:
    params, others = make_params(variant.leaf), make_params(variant.leaf)
    optimizer = variant.make(params)
    for step in range(2):
        set_grads(params, step, variant.sparse)
        optimizer.step()
    new = variant.make(others)
    load_optimizer_state(new, optimizer.state_dict())
    assert bits(new.state_dict()) == bits(optimizer.state_dict())


def _lbfgs(model: Holder, steps: int) -> torch.optim.LBFGS:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([(p**4).sum() for p in model.parameters()]).sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return optimizer


def test_lists_of_tensors_are_copied_with_their_precision() -> None:
    model = Holder("ab")
    optimizer = _lbfgs(model, 2)
    state = optimizer.state[model.a]
    state["old_dirs"] = [value.double() for value in state["old_dirs"]]
    saved = optimizer.state_dict()
    new = _lbfgs(model, 0)
    load_optimizer_state(new, saved, model=model, names=[["a", "b"]])
    assert bits(new.state_dict()) == bits(saved)
    assert new.state[model.a]["old_dirs"][0].data_ptr() != state["old_dirs"][0].data_ptr()


def test_one_vector_over_all_parameters_is_not_loaded_in_another_order() -> None:
    model = Holder("ab")
    saved = _lbfgs(model, 2).state_dict()
    other = Holder("ba")
    with pytest.raises(CheckpointError, match="LBFGS keeps one vector over all parameters"):
        load_optimizer_state(_lbfgs(other, 0), saved, model=other, names=[["a", "b"]])


Pair = namedtuple("Pair", "low high")


def test_state_that_torch_can_not_cast_is_loaded_and_foreign_entries_are_kept() -> None:
    model, optimizer = trained("ab")
    optimizer.state[model.a].update(kind="slow", pair=Pair(torch.ones(1), 2), none=None)
    optimizer.state["global"] = {"count": torch.tensor(3)}
    saved = optimizer.state_dict()
    new = adam(model)
    load_optimizer_state(new, saved, model=model, names=[["a", "b"]])
    assert new.state[model.a]["kind"] == "slow" and new.state[model.a]["pair"] == Pair(torch.ones(1), 2)
    assert new.state[model.a]["none"] is None and new.state["global"]["count"] == 3


def test_entries_of_an_unknown_optimizer_are_judged_by_those_of_the_others() -> None:
    model, optimizer = trained("abcd")
    saved = copy.deepcopy(optimizer.state_dict())
    for place, state in saved["state"].items():
        state["slow"] = torch.zeros_like(state["exp_avg"]) if place else torch.zeros(7)
        state["row"] = torch.zeros(state["exp_avg"].shape[0])  # of no parameter's shape: a factor
    with pytest.raises(CheckpointError, match=r"'a' has a saved slow of shape \(7,\)") as caught:
        load_optimizer_state(adam(model), saved, model=model, names=[list("abcd")])
    assert "row" not in str(caught.value).split("not the same")[1].split("\n")[0].replace("strict", "")


def test_hooks_and_an_optimizers_own_load_state_dict_are_used() -> None:
    class Own(torch.optim.AdamW):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            self.loaded = True

    model, optimizer = trained("ab")
    new = Own(model.parameters(), lr=0.5)
    called = []
    new.register_load_state_dict_post_hook(lambda _: called.append(1))
    load_optimizer_state(new, optimizer.state_dict(), model=model, names=[["a", "b"]])
    assert new.loaded and called and torch.equal(new.state[model.a]["exp_avg"], optimizer.state[model.a]["exp_avg"])


def test_an_optimizer_whose_own_code_fails_is_put_back() -> None:
    model, optimizer = trained("ab")
    new = adam(model)
    model.train_once(new, 9)
    state, groups, before = new.state, new.param_groups, bits(new.state_dict())

    def fail(_: Any) -> None:
        raise ValueError("no")

    new.register_load_state_dict_post_hook(fail)
    with pytest.raises(ValueError, match="no"):
        load_optimizer_state(new, optimizer.state_dict(), model=model, names=[["a", "b"]])
    assert new.state is state and new.param_groups is groups and bits(new.state_dict()) == before


def test_a_tensor_learning_rate_stays_a_tensor() -> None:
    model, optimizer = trained("ab")
    new = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    load_optimizer_state(new, optimizer.state_dict(), model=model, names=[["a", "b"]])
    lr = new.param_groups[0]["lr"]
    assert isinstance(lr, Tensor) and lr.item() == pytest.approx(0.1)


def test_a_state_of_which_nothing_matches_is_an_error_in_either_way() -> None:
    model, optimizer = trained("ab")
    for strict in (True, False):
        with pytest.raises(CheckpointError, match="no parameter of this state matches the optimizer"):
            load_optimizer_state(adam(model), optimizer.state_dict(), model=model, names=[["x", "y"]], strict=strict)


def test_a_whole_checkpoint_is_refused_with_the_entry_to_use() -> None:
    model, optimizer = trained("ab")
    whole = {"model": model.state_dict(), "optimizers": {"main": optimizer.state_dict()}}
    with pytest.raises(CheckpointError, match=r'use state\["optimizers"\]\["main"\], as in load_optimizer_state'):
        load_optimizer_state(optimizer, whole)
    with pytest.raises(CheckpointError, match="'state' and 'param_groups'.*it holds 'a', 'b'"):
        load_optimizer_state(optimizer, model.state_dict())
    with pytest.raises(TypeError, match=r"got a AdamW: give optimizer.state_dict\(\) of it"):
        load_optimizer_state(optimizer, optimizer)  # type: ignore[arg-type]


def test_state_keyed_by_names_as_distributed_checkpoints_have_it() -> None:
    model, optimizer = trained("ab")
    saved = optimizer.state_dict()
    saved["state"] = {name: saved["state"][i] for i, name in enumerate("ab")}
    saved["param_groups"][0]["params"] = ["a", "b"]
    other = with_weights_of(model, "ba")
    new = adam(other)
    load_optimizer_state(new, saved, model=other)
    assert continued(other, new) == continued(model, optimizer)


def test_a_tied_parameter_is_found_by_any_of_its_names() -> None:
    model, optimizer = trained("ab")
    model.z = model.a  # type: ignore[assignment]
    report = load_optimizer_state(adam(model), optimizer.state_dict(), model=model, names=[["z", "b"]])
    assert report.complete and report.adapted == ()


def test_a_complete_match_warns_of_nothing() -> None:
    model, optimizer = trained("ab")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_optimizer_state(adam(model), optimizer.state_dict(), model=model, names=[["a", "b"]])
