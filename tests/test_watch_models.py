"""What is watched in models as people build them, and that watching changes nothing."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanscan
from benchmarks.models import gpt_step, resnet_step

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def keys(ranges: nanscan.Watch, kind: str = "activation") -> list[str]:
    return [row.module for row in ranges.rows(kind=kind)]


@pytest.mark.parametrize("make", (resnet_step, gpt_step))
def test_results_are_the_same_in_every_bit(make: Any) -> None:
    runs = []
    for watched in (False, True):
        model, step = make(2)
        ranges = nanscan.watch(model) if watched else None
        losses = [step().detach() for _ in range(3)]
        runs.append([*losses, *(p.grad for p in model.parameters()), *model.buffers()])
        assert ranges is None or len(ranges.rows()) > 100
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu, self.last = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.relu(self.fc(x)))
        out += 100.0
        return out


def test_an_activation_is_measured_before_it_is_changed_in_place() -> None:
    model = InPlace()
    with nanscan.watch(model) as ranges:
        model(X).sum().backward()
    plain = model.fc(X)
    rows = {row.module: row for row in ranges.rows(kind="activation")}
    assert rows["fc"].min == plain.min().item() < 0 == rows["relu"].min
    assert rows["last"].max < 50 < rows["InPlace"].min  # the model's own output is no longer that of its last layer
    assert sorted(keys(ranges, "gradient")) == ["InPlace", "fc", "last", "relu"]


def test_a_container_that_hands_on_the_output_of_a_child_has_no_row_of_its_own() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU())), nn.Identity())
    with nanscan.watch(model) as ranges:
        model(X).sum().backward()
    assert keys(ranges) == ["0.0", "0.1.0"] and keys(ranges, "gradient") == ["0.1.0", "0.0"]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.same = self.fc

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.same(self.fc(x) * 100)
        return result


def test_a_module_called_twice_has_one_row_over_both_calls() -> None:
    model = Twice()
    with nanscan.watch(model) as ranges:
        model(X).sum().backward()
    (row,) = ranges.rows(kind="activation")
    once = model.fc(X)
    both = torch.cat([once, model.fc(once * 100)])
    assert (row.module, row.min, row.max) == ("fc", both.min().item(), both.max().item())
    assert row.rms == pytest.approx(both.square().mean().sqrt().item())
    assert keys(ranges, "gradient") == ["fc"]


@dataclass
class Output:
    logits: Tensor
    aux: dict[str, Any]


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Output:
        return Output(x * 2, {"hidden": (x - 5, [x + 7, None]), "ids": torch.tensor([99])})


def test_nested_outputs_are_one_row_over_all_their_tensors() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Nested())
    with nanscan.watch(model) as ranges:
        out = model(X)
        (out.logits.sum() + out.aux["hidden"][0].sum()).backward()
    x = model[0](X)
    row = ranges.rows("1", "activation")[0]
    assert (row.min, row.max) == ((x - 5).min().item(), (x + 7).max().item())
    assert ranges.rows("1", "gradient")[0].rms == 1.0


def test_a_recurrent_net_has_its_row() -> None:
    model = nn.LSTM(4, 5, batch_first=True)
    with nanscan.watch(model) as ranges:
        model(X.unsqueeze(0))[0].sum().backward()
    assert [(row.module, row.kind) for row in ranges.rows()] == [("LSTM", "activation"), ("LSTM", "gradient")]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        result: Tensor = (
            self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        )
        return result


@pytest.mark.parametrize("reentrant", (False, True))
def test_a_recomputed_forward_is_not_counted_again_and_its_gradients_are_seen(reentrant: bool) -> None:
    rows = []
    for how in (None, reentrant):
        torch.manual_seed(0)
        model = Checkpointed(how)
        with nanscan.watch(model) as ranges:
            for _ in range(2):
                model(X).sum().backward()
        found = [row for row in ranges.rows() if row.module != "Checkpointed"]
        rows.append({(row.step, row.module, row.kind): row for row in found})
        assert ranges.steps == 2
    assert rows[0] == rows[1] and len(rows[0]) == 12


@pytest.mark.parametrize("reentrant", (False, True))
def test_a_model_that_is_checkpointed_as_a_whole_is_one_step(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with nanscan.watch(model) as ranges:
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert ranges.steps == 1 and keys(ranges) == ["0", "1"] and keys(ranges, "gradient") == ["1", "0"]


def test_only_training_is_measured() -> None:
    model = nn.Linear(4, 4)
    with nanscan.watch(model) as ranges:
        model.eval()
        model(X).sum().backward()
        model.train()
        with torch.no_grad():
            model(X)
        with torch.inference_mode():
            model(X)
        assert ranges.steps == 0 and ranges.rows() == []
        model(X)
        assert ranges.steps == 1 and keys(ranges) == ["Linear"]


class Raises(nn.Module):
    fail = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fail:
            raise RuntimeError("out of luck")
        return x * 2


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Raises())
    with nanscan.watch(model) as ranges:
        with pytest.raises(RuntimeError, match="out of luck"):
            model(X)
        model[0](X * 1000)  # not in a step
        model[1].fail = False
        model(X)
    assert [(row.step, row.module) for row in ranges.rows()] == [(0, "0"), (1, "0"), (1, "1")]
    assert ranges.rows("0")[0].max == ranges.rows("0")[1].max


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast_activations_are_measured_in_their_own_dtype(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(2e4)
        model.bias.zero_()
    with nanscan.watch(model) as ranges, torch.autocast("cpu", dtype):
        model(torch.ones(1, 4))
    bad = ranges.first_bad
    assert bad is not None and ("non-finite" if dtype is torch.float16 else "in bfloat16") in bad.reason


def test_copies_and_pickles_of_a_watched_model_are_not_watched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    ranges = nanscan.watch(model)
    model(X)
    assert len(list(hooks_of(model))) >= 3 and nanscan.find_unpicklable(model) == []
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for other in copies:
        other(X).sum().backward()
    assert ranges.steps == 1
    model(X)
    assert ranges.steps == 2
    ranges.close()
    assert nanscan.find_unpicklable(model) == [] and b"nanscan" not in pickle.dumps(model)


def test_what_was_found_can_be_pickled() -> None:
    model = nn.Linear(4, 4)
    with nanscan.watch(model) as ranges:
        model(X * float("inf")).sum().backward()
        other = pickle.loads(pickle.dumps(ranges))
    assert str(other.rows()) == str(ranges.rows()) and str(other.first_bad) == str(ranges.first_bad)
    assert other.steps == 1 and other.describe() == ranges.describe()
    other.close()


def hooks_of(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        for table in (module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_always_called):
            yield from table.values()
        if module._compiled_call_impl is not None:
            yield module._compiled_call_impl


def test_two_watches_see_the_same_and_close_by_themselves() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    first, second = nanscan.watch(model), nanscan.watch(model)
    model(X).sum().backward()
    assert first.rows() == second.rows() != []
    first.close()
    model(X).sum().backward()
    assert (first.steps, second.steps) == (1, 2)
    second.close()
    second.close()
    assert list(hooks_of(model)) == []


def test_closing_between_forward_and_backward_measures_no_gradient() -> None:
    model = nn.Linear(4, 4)
    ranges = nanscan.watch(model)
    loss = model(X).sum()
    ranges.close()
    loss.backward()
    assert keys(ranges, "gradient") == [] and keys(ranges) == ["Linear"]


class ReturnsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


def test_hooks_do_not_gather_on_a_parameter_that_is_returned_as_it_is() -> None:
    model = ReturnsItsWeight()
    with nanscan.watch(model) as ranges:
        for _ in range(3):
            model(X).sum().backward()
        assert len(model.weight._backward_hooks) == 1
    assert len(model.weight._backward_hooks) == 0 and len(keys(ranges, "gradient")) == 3


def test_a_scripted_part_is_left_out_and_a_scripted_model_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nn.Sequential(scripted, nn.Linear(4, 2))
    with nanscan.watch(model) as ranges:
        model(X).sum().backward()
    assert keys(ranges) == ["1"]
    with pytest.raises(TypeError, match=r"torch\.jit\.script takes no hooks"):
        nanscan.watch(scripted)


def test_a_functional_transform_runs_as_before() -> None:
    model = nn.Linear(4, 4)
    parameters = dict(model.named_parameters())
    with nanscan.watch(model):
        gradient = torch.func.grad(lambda p: torch.func.functional_call(model, p, (X,)).sum())(parameters)
        torch.func.vmap(lambda x: torch.func.functional_call(model, parameters, (x,)))(X)
    assert torch.allclose(gradient["bias"], torch.full((4,), 3.0))
