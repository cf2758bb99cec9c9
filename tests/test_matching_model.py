"""Loading a model's weights by name: wrappers' prefixes, every difference named, all or nothing."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanscan import CheckpointError, CheckpointWarning
from nanscan.matching import load_model_state
from nanscan.matching.keys import pair
from tests.guarded import bits


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def compiled_inside() -> nn.Module:
    net = Net()
    net.encoder = compiled(net.encoder)  # type: ignore[assignment]
    return net


class Lightning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Net()


FORMS = {
    "plain": Net,
    "DataParallel": lambda: nn.DataParallel(Net()),
    "compiled": lambda: compiled(Net()),
    "compiled DataParallel": lambda: compiled(nn.DataParallel(Net())),
    "DataParallel of compiled": lambda: nn.DataParallel(compiled(Net())),
    "compiled inside": compiled_inside,
    "Lightning": Lightning,
}


def filled(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for value in model.state_dict().values():
        value.copy_(torch.randint(0, 9, value.shape, generator=generator))
    return model


def values(model: nn.Module) -> Any:
    return bits(list(model.state_dict().values()))


@pytest.mark.parametrize("saved_as", FORMS)
@pytest.mark.parametrize("loaded_as", FORMS)
def test_every_form_of_a_model_loads_every_other(saved_as: str, loaded_as: str) -> None:
    source, target = filled(FORMS[saved_as](), 1), filled(FORMS[loaded_as](), 2)
    report = load_model_state(target, source.state_dict())
    assert values(target) == values(source)
    keys = zip(source.state_dict(), target.state_dict(), strict=True)
    assert len(report.adapted) == sum(a != b for a, b in keys)
    assert report.complete and len(report.loaded) == len(target.state_dict())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod.module."])
@pytest.mark.parametrize("strict", [True, False])
def test_prefixes_are_adapted_and_counted(prefix: str, strict: bool) -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    report = load_model_state(target, {prefix + k: v for k, v in source.state_dict().items()}, strict=strict)
    assert torch.equal(source.weight, target.weight) and torch.equal(source.bias, target.bias)
    assert "2 of 2 names of the model loaded (2 adapted" in report.describe()


def test_a_submodule_called_module_is_not_taken_for_a_wrapper() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.weight = nn.Parameter(torch.zeros(2, 2))

    source, target = filled(Owner(), 1), nn.DataParallel(filled(Owner(), 2))
    load_model_state(target, source.state_dict())
    assert values(target) == values(source)
    back = filled(Owner(), 3)
    load_model_state(back, target.state_dict())
    assert values(back) == values(source)


def test_keys_of_which_only_some_have_a_prefix_are_adapted() -> None:
    assert pair(["module.a.weight", "b.weight"], ["a.weight", "b.weight"]) == {
        "a.weight": "module.a.weight",
        "b.weight": "b.weight",
    }


def test_strict_names_every_difference_and_changes_nothing() -> None:
    target = filled(Net(), 1)
    before = values(target)
    state = filled(Net(), 2).state_dict()
    state["head.weight"] = torch.zeros(3, 4)
    state["encoder.0.bias"] = torch.zeros(4, dtype=torch.complex64)
    state["encoder.lin.weight"] = state.pop("encoder.0.weight")
    del state["head.bias"]
    state["epoch"] = 3
    with pytest.raises(CheckpointError) as caught:
        load_model_state(target, state)
    text = str(caught.value)
    assert "missing in the checkpoint (2): 'encoder.0.weight', 'head.bias'" in text
    assert "not in the model (2): 'encoder.lin.weight', 'epoch'" in text
    assert "'head.weight' has shape (3, 4) in the checkpoint, (2, 4) in the model" in text
    assert "'encoder.0.bias' is complex64 in the checkpoint and float32 in the model" in text
    assert "the model's 'encoder.0.weight' may be the checkpoint's 'encoder.lin.weight'" in text
    assert values(target) == before


def test_not_strict_loads_what_matches_and_warns_with_every_name() -> None:
    source, target = filled(Net(), 1), filled(Net(), 2)
    state = source.state_dict()
    del state["head.bias"]
    state["head.weight"] = torch.zeros(5, 4)
    state["old"] = torch.zeros(1)
    with pytest.warns(CheckpointWarning, match=r"'head.bias'.*'old'.*'head.weight' has shape \(5, 4\)") as caught:
        report = load_model_state(target, state, strict=False)
    assert caught[0].filename == __file__
    assert torch.equal(target.encoder[0].weight, source.encoder[0].weight)  # type: ignore[index]
    assert not torch.equal(target.head.bias, source.head.bias)  # type: ignore[union-attr]
    assert report.missing == ("head.bias",) and report.unexpected == ("old",)
    assert [item.name for item in report.mismatched] == ["head.weight"] and not report.complete


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("state", [{}, {"other.thing": torch.zeros(1)}, {"head.weight": torch.zeros(9, 9)}])
def test_a_state_of_which_nothing_matches_is_an_error(state: dict[str, Tensor], strict: bool) -> None:
    target = filled(Net(), 1)
    before = values(target)
    with pytest.raises(CheckpointError, match="nothing|no tensor"):
        load_model_state(target, state, strict=strict)
    assert values(target) == before


def test_a_foreign_prefix_is_named_with_what_to_write() -> None:
    state = {f"backbone.{name}": value for name, value in Net().state_dict().items()}
    with pytest.raises(CheckpointError, match=r"begin with 'backbone.': give \{name.removeprefix\('backbone.'\)"):
        load_model_state(Net(), state, strict=False)


def test_lightnings_prefix_is_adapted_only_if_everything_matches_then() -> None:
    state = {f"model.{name}": value for name, value in Net().state_dict().items()}
    state["metric.total"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="begin with 'model.'"):
        load_model_state(Net(), state, strict=False)


def test_a_whole_checkpoint_is_refused_with_the_entry_to_use() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    whole = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    with pytest.raises(
        CheckpointError, match=r'use state\["model"\], as in load_model_state\(model, state\["model"\]\)'
    ):
        load_model_state(net, whole)
    with pytest.raises(CheckpointError, match=r'use state\["state_dict"\]'):
        load_model_state(net, {"state_dict": nn.DataParallel(net).state_dict(), "ema": {"x": torch.zeros(1)}})
    with pytest.raises(CheckpointError, match=r'use state\["nets"\]\["generator"\]'):
        load_model_state(net, {"nets": {"generator": net.state_dict(), "critic": {"w": torch.zeros(1)}}})
    with pytest.raises(CheckpointError, match="it holds no tensor, only 'epoch'"):
        load_model_state(net, {"epoch": 3})


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("last.pt", "got the path 'last.pt': load it first, with nanscan.load"),
        (nn.Linear(1, 1), r"got a Linear: give model.state_dict\(\) of it"),
        ([1], "got list"),
    ],
)
def test_what_is_no_dict_is_a_type_error(state: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        load_model_state(Net(), state)


def test_another_dtype_is_loaded_and_named() -> None:
    target = Net()
    state = {name: v.bfloat16() if v.is_floating_point() else v for name, v in filled(Net(), 1).state_dict().items()}
    with pytest.warns(CheckpointWarning, match="'head.weight' is bfloat16 in the checkpoint, float32 in the model"):
        report = load_model_state(target, state)
    assert target.head.weight.dtype == torch.float32 and torch.equal(target.head.weight, state["head.weight"].float())
    assert report.complete and len(report.converted) == len(state) - 1


def test_where_warnings_are_errors_a_refused_load_changes_nothing() -> None:
    target = filled(Net(), 1)
    before = values(target)
    state = filled(Net(), 2).state_dict()
    del state["head.bias"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointWarning):
            load_model_state(target, state, strict=False)
    assert values(target) == before


def test_the_callers_state_is_neither_shared_nor_changed() -> None:
    source, target = filled(Net(), 1), Net()
    state = OrderedDict((f"module.{name}", value) for name, value in source.state_dict().items())
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    before, metadata = bits(dict(state)), copy.deepcopy(state._metadata)  # type: ignore[attr-defined]
    load_model_state(target, state)
    with torch.no_grad():
        for value in target.state_dict().values():
            value.add_(1)
    assert bits(dict(state)) == before and state._metadata == metadata  # type: ignore[attr-defined]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight


def test_one_name_of_a_tied_weight_is_enough() -> None:
    source, target = Tied(), Tied()
    report = load_model_state(target, {"head.weight": source.head.weight.detach()})
    assert torch.equal(target.emb.weight, source.emb.weight) and target.emb.weight is target.head.weight
    assert report.complete and set(report.loaded) == {"emb.weight", "head.weight"}


def test_two_values_for_a_tied_weight_are_refused() -> None:
    state = {"emb.weight": torch.zeros(5, 3), "head.weight": torch.ones(5, 3)}
    with pytest.raises(CheckpointError, match="'head.weight' is tied to 'emb.weight' in the model"):
        load_model_state(Tied(), state)
    nan = torch.full((5, 3), float("nan"))
    load_model_state(Tied(), {"emb.weight": nan, "head.weight": nan.clone()})


class WithExtra(nn.Module):
    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if state == "bad":
            raise ValueError("no such state")
        self.extra = state


def test_extra_state_is_loaded_and_missing_extra_state_is_named() -> None:
    target = nn.DataParallel(WithExtra())
    load_model_state(target, WithExtra({"a": 1}).state_dict())
    assert target.module.extra == {"a": 1}
    state = WithExtra().state_dict()
    del state["_extra_state"]
    with pytest.raises(CheckpointError, match="'_extra_state'"):
        load_model_state(WithExtra(), state)


def test_a_model_whose_own_code_fails_while_loading_is_put_back() -> None:
    target = WithExtra("mine")
    before = values(target.lin)
    state = filled(nn.Sequential(OrderedDict(lin=nn.Linear(2, 2))), 2).state_dict()
    with pytest.raises(ValueError, match="no such state"):
        load_model_state(target, {**state, "_extra_state": "bad"})
    assert values(target.lin) == before and target.extra == "mine"


def test_hooks_of_the_model_rename_and_the_difference_left_is_named_and_undone() -> None:
    target = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    state = {"module.0.bias": torch.ones(2), "module.0.weight_g": torch.ones(2, 1), "module.0.weight_v": torch.eye(2)}
    assert load_model_state(target, state).complete
    assert torch.equal(target[0].weight, torch.eye(2))
    before = values(target)
    with pytest.raises(CheckpointError, match=r"not in the model \(1\): 'other'"):
        load_model_state(target, {name: 2 * value for name, value in state.items()} | {"module.other": torch.ones(1)})
    assert values(target) == before


def test_a_batch_norms_counter_may_be_missing_from_an_old_state_only() -> None:
    state = filled(nn.BatchNorm1d(3), 1).state_dict()
    del state["num_batches_tracked"]
    with pytest.raises(CheckpointError, match="missing in the checkpoint.*'num_batches_tracked'"):
        load_model_state(nn.BatchNorm1d(3), state)
    assert load_model_state(nn.BatchNorm1d(3), dict(state)).complete  # torch takes it too: no version, so it may be old


def test_a_meta_model_gets_memory_and_keeps_its_ties() -> None:
    source = filled(Tied(), 1)
    with torch.device("meta"):
        target = Tied()
    state = source.state_dict()
    load_model_state(target, state)
    assert torch.equal(target.head.weight, source.head.weight) and target.head.weight is target.emb.weight
    assert target.emb.weight.requires_grad and target.emb.weight.data_ptr() != state["emb.weight"].data_ptr()


def test_what_stays_on_the_meta_device_is_named() -> None:
    with torch.device("meta"):
        target = Net()
        target.register_buffer("mask", torch.zeros(2), persistent=False)
    with pytest.warns(CheckpointWarning, match="still on the meta device, without values: 'mask'"):
        load_model_state(target, Net().state_dict())
    state = Net().state_dict()
    state["head.bias"] = torch.zeros(7)
    with torch.device("meta"):
        target = Net()
    with pytest.raises(CheckpointError):
        load_model_state(target, state)
    assert all(p.is_meta for p in target.parameters())


def test_a_buffer_that_is_not_persistent_is_unexpected_and_said_to_be_one() -> None:
    net = Net()
    net.register_buffer("mask", torch.zeros(2), persistent=False)
    with pytest.raises(CheckpointError, match=r"computes itself \(persistent=False\): 'mask'"):
        load_model_state(net, {**net.state_dict(), "mask": torch.ones(2)})


def test_a_lazy_model_takes_the_checkpoints_shapes() -> None:
    source, target = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.LazyLinear(2))
    load_model_state(target, nn.DataParallel(source).state_dict())
    assert torch.equal(target[0].weight, source[0].weight)
    with pytest.raises(CheckpointError, match="saved before the first forward pass"):
        load_model_state(source, nn.Sequential(nn.LazyLinear(2)).state_dict())


def test_a_value_that_is_no_tensor_is_named() -> None:
    with pytest.raises(CheckpointError, match="'bias' is a list in the checkpoint, not a tensor"):
        load_model_state(nn.Linear(1, 1), {"weight": torch.zeros(1, 1), "bias": [0.0]})


def test_renamed_layers_of_a_large_model_are_suggested_in_time() -> None:
    names = [f"encoder.layers.{i}.mlp.fc{j}.weight" for i in range(500) for j in (1, 2)]
    target = nn.Module()
    target.state_dict = lambda **_: {name: torch.zeros(1) for name in names}  # type: ignore[assignment,misc]
    state = {name.replace("layers", "blocks"): torch.zeros(1) for name in names}
    with pytest.raises(CheckpointError, match="'encoder.layers.0.mlp.fc1.weight' may be .* 'encoder.blocks.0"):
        load_model_state(target, {**state, names[0] + "x": torch.zeros(1)})


def test_of_two_names_that_read_alike_neither_is_guessed() -> None:
    zeros, ones = torch.zeros(1, 1), torch.ones(1, 1)
    state = {"module.weight": zeros, "_orig_mod.weight": ones, "module.bias": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint \(1\): 'weight'") as caught:
        load_model_state(nn.Linear(1, 1), state)
    assert "not in the model (2): 'module.weight', '_orig_mod.weight'" in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        (torch.tensor([1.0, 1e6]), torch.zeros(2, dtype=torch.float16)),
        (torch.tensor([1.0, 1e39], dtype=torch.float64), torch.zeros(2, dtype=torch.bfloat16)),
        (torch.tensor([1, 1 << 40]), torch.zeros(2, dtype=torch.int32)),
    ],
)
def test_values_beyond_the_range_of_the_models_dtype_are_refused_and_changed_by_nothing(
    saved: Tensor, own: Tensor
) -> None:
    model = nn.Module()
    model.register_buffer("scale", own)
    with pytest.raises(
        CheckpointError, match=r"'scale' is \w+ in the checkpoint and has 1 value\(s\) beyond the range"
    ):
        load_model_state(model, {"scale": saved})
    assert not own.any()
    with pytest.warns(CheckpointWarning, match="of another dtype"):  # what fits is rounded, as ever, and said
        load_model_state(model, {"scale": torch.tensor([1, 7], dtype=saved.dtype)})
    assert own.tolist() == [1, 7]


def test_inf_in_a_mask_is_in_every_range() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.zeros(2, dtype=torch.float16))
    with pytest.warns(CheckpointWarning, match="of another dtype"):
        load_model_state(model, {"mask": torch.tensor([0.0, float("-inf")])})
    assert model.mask.tolist() == [0.0, float("-inf")]


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_left_to_torch() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    model = nn.Module()
    model.register_buffer("weight", quantized.clone())
    load_model_state(model, {"weight": torch.full((2,), 0.5)})
    assert model.weight.dequantize().tolist() == pytest.approx([0.5, 0.5])
    model.register_buffer("weight", torch.zeros(2))
    with pytest.raises(CheckpointError, match="can't be loaded"):
        load_model_state(model, {"weight": quantized})
