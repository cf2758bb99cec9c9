"""What a fix says can be written as it stands there, and does away with the fault."""

from __future__ import annotations

import collections
import copy
import functools
import ipaddress
import itertools
import logging
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nanscan
from nanscan import find_unpicklable
from tests.unpicklable import Named, Slotted


class Id(int):
    pass


class Tagged(torch.Tensor):
    """A subclass without code of its own: torch.save takes it, copy.deepcopy does not."""


class Copyable(torch.Tensor):
    def __deepcopy__(self, memo: Any) -> Any:
        return self.detach().clone().as_subclass(type(self))


_UNSAFE: dict[str, Any] = {
    "integer of a class": Id(3),
    "reversed array": np.arange(6.0)[::-2],
    "array of another byte order": np.ones(2, ">f4"),
    "long double": np.ones(2, np.longdouble),
    "read-only memory": np.frombuffer(b"abcdefgh", "f4"),
    "masked array": np.ma.array([1.0, 2.0], mask=[0, 1]),
    "record": np.zeros(1, [("a", "i4"), ("b", "f8")])[0],
    "function of numpy": np.sin,
    "user dict": collections.UserDict(a=1),
    "address": ipaddress.ip_address("10.0.0.1"),
    "type hint": list[int],
}


@pytest.mark.parametrize("kind", _UNSAFE)
@pytest.mark.filterwarnings("ignore")
def test_what_is_to_be_stored_instead_loads_with_weights_only(kind: str, tmp_path: Path) -> None:
    value = _UNSAFE[kind]
    (problem,) = find_unpicklable({"x": value}, weights_only=True)
    assert problem.path == 'state["x"]'
    said = re.match(r"store (.+?)(?:, or .*|; .*)?$", problem.fix)
    assert said is not None, problem.fix
    if said[1] == "its name as a str":
        return
    stored = [eval(part, {"x": value, "torch": torch, "np": np}) for part in said[1].split(" and ")]
    nanscan.save({"x": stored}, tmp_path / "x.pt")
    assert len(nanscan.load(tmp_path / "x.pt")["x"]) == len(stored)


def test_a_configuration_inside_a_configuration_is_not_forgotten() -> None:
    nested = Named(lr=0.1, model=Named(width=8))
    (problem,) = find_unpicklable({"x": nested}, weights_only=True)
    assert problem.fix == "store dict(x), and the same of those inside it"
    assert find_unpicklable({"x": {**nested, "model": dict(nested["model"])}}, weights_only=True) == []


@pytest.mark.parametrize("value", [itertools.cycle([1]), Slotted(1, 2), object()])
def test_what_has_no_attributes_is_not_told_to_give_a_dict_of_them(value: Any) -> None:
    (problem,) = find_unpicklable({"x": value}, weights_only=True)
    assert "vars(" not in problem.fix


def test_a_function_that_is_saved_by_its_name_alone_is_named_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(nanscan.CheckpointError, match=re.escape('state["act"]')):
        nanscan.save({"act": np.tanh}, tmp_path / "x.pt")


def test_an_attribute_of_a_tensor_is_to_be_deleted_as_nobody_can_write_its_getstate() -> None:
    model = nn.Linear(2, 2)
    model.weight.lock = threading.Lock()  # type: ignore[attr-defined]
    (problem,) = find_unpicklable(model)
    assert problem.path == "model.weight.lock" and problem.fix.startswith("delete the attribute")
    assert "__getstate__" not in problem.fix
    del model.weight.lock
    assert find_unpicklable(model) == []


def test_a_wrapper_on_an_instance_is_to_be_taken_off() -> None:
    model = nn.Linear(2, 2)

    @functools.wraps(model.forward)
    def traced(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, model.weight)

    model.forward = traced  # type: ignore[method-assign]
    (problem,) = find_unpicklable(model)
    assert problem.path == "model.forward" and "del model.forward" in problem.fix
    del model.forward
    assert find_unpicklable(model) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ops.aten.relu, "operator of torch.ops"),
        (torch.ops.aten.relu.default, "operator of torch.ops"),
        (torch.nn.attention.SDPBackend.MATH, "x.name"),
        (logging.Logger("made by hand"), "logging.getLogger"),
        (nanscan.CheckpointManager("never/made"), "keep its directory"),
    ],
)
def test_an_object_of_this_process_is_one_finding_with_the_way_to_it(value: Any, words: str) -> None:
    (problem,) = find_unpicklable({"x": value})
    assert problem.path == 'state["x"]' and words in problem.reason + problem.fix


def test_a_value_that_outlived_its_transform_is_named() -> None:
    kept = []
    torch.vmap(lambda x: kept.append(x) or x)(torch.ones(2))  # type: ignore[func-returns-value]
    with pytest.raises(NotImplementedError):
        pickle.dumps(kept)
    (problem,) = find_unpicklable(kept, name="kept")
    assert problem.path == "kept[0]" and "torch.vmap" in problem.reason


def test_a_subclass_of_tensors_that_can_not_be_copied_is_a_loss_told_once() -> None:
    model = nn.Linear(2, 2)
    model.images = [torch.ones(2).as_subclass(Tagged) for _ in range(3)]  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="__deepcopy__"):
        copy.deepcopy(model)
    (problem,) = find_unpicklable(model)
    assert problem.path == "model.images[0]" and problem.severity == "loss" and "copy.deepcopy" in problem.reason
    model.images = [torch.ones(2).as_subclass(Copyable)]  # type: ignore[assignment]
    assert find_unpicklable(model) == [] and type(copy.deepcopy(model).images[0]) is Copyable  # type: ignore[index]


class Sparse(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore")
def test_a_sparse_parameter_that_can_not_be_copied_is_a_loss_and_its_state_can_be(layout: torch.layout) -> None:
    model, other = Sparse(torch.eye(2).to_sparse(layout=layout)), Sparse(torch.zeros(2, 2).to_sparse(layout=layout))
    with pytest.raises(RuntimeError):
        copy.deepcopy(model)
    (problem,) = find_unpicklable(model)
    assert problem.path == "model.weight" and problem.severity == "loss" and "load_state_dict" in problem.fix
    if layout is torch.sparse_coo:
        other.load_state_dict(model.state_dict())
        assert torch.equal(other.weight.to_dense(), torch.eye(2))
    assert find_unpicklable({"x": torch.eye(2).to_sparse()}) == []
    assert find_unpicklable(model, for_process=True, check_loading=False) == []


class Sharded(nn.Parameter):
    pass


def test_a_subclass_of_parameters_is_loaded_as_a_parameter_and_this_is_a_loss() -> None:
    model = nn.Linear(2, 2)
    model.weight = Sharded(torch.ones(2, 2))
    assert type(pickle.loads(pickle.dumps(model)).weight) is nn.Parameter
    for for_process in (False, True):  # its data belong to it: nothing is lost on the way
        (problem,) = find_unpicklable(model, for_process=for_process)
        assert problem.path == "model.weight" and problem.severity == "loss" and "torch.nn.Parameter" in problem.reason
    assert find_unpicklable(nn.LazyLinear(2)) == []


def test_the_class_of_a_tensor_must_be_found_like_any_other() -> None:
    class Local(torch.Tensor):
        pass

    batch = {"x": torch.ones(2).as_subclass(Local)}
    with pytest.raises(AttributeError, match="local object"):
        pickle.dumps(batch)
    for for_process in (False, True):
        (problem,) = find_unpicklable(batch, for_process=for_process)
        assert problem.path == 'batch["x"]' and problem.severity == "error" and "local class" in problem.reason


def test_to_another_process_a_subclass_with_a_graph_goes_without_it() -> None:
    weight = torch.ones(2, requires_grad=True)
    for value, severity in (((weight * 2).as_subclass(Tagged), "loss"), (weight * 2, "error")):
        (problem,) = find_unpicklable({"x": value}, for_process=True)
        assert problem.severity == severity and "graph" in problem.reason


def test_a_tensor_of_onednn_can_not_be_saved() -> None:
    value = torch.ones(2, 2).to_mkldnn()
    with pytest.raises(NotImplementedError):
        pickle.dumps(value)
    (problem,) = find_unpicklable({"x": value})
    assert problem.severity == "error" and "to_dense()" in problem.fix
    assert find_unpicklable({"x": value.to_dense()}) == []


def test_a_nested_tensor_that_can_not_be_copied_is_a_loss() -> None:
    rows = [torch.ones(2), torch.ones(3)]
    (problem,) = find_unpicklable({"x": torch.nested.nested_tensor(rows)})
    assert problem.severity == "loss" and "torch.jagged" in problem.fix
    assert find_unpicklable({"x": torch.nested.nested_tensor(rows, layout=torch.jagged)}) == []
    assert find_unpicklable({"x": torch.nested.nested_tensor(rows)}, for_process=True) == []
