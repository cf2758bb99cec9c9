"""Objects whose own code is in the way, and words that have to point at what somebody wrote."""

from __future__ import annotations

import dataclasses
import enum
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import nanscan
from nanscan import find_unpicklable
from tests.unpicklable import ComparesAsTensor, SlotsCantBeSet, Untouchable

HUGE = 1 << 3000


def test_an_object_that_compares_as_arrays_do_is_judged_like_any_other() -> None:
    assert find_unpicklable([ComparesAsTensor(), {"more": ComparesAsTensor()}]) == []


def test_a_quantized_model_is_judged() -> None:
    layer = torch.ao.nn.quantized.Linear(2, 2)
    pickle.loads(pickle.dumps(nn.Sequential(layer, layer)))
    assert find_unpicklable(nn.Sequential(layer, torch.ao.nn.quantized.Linear(2, 2))) == []


def test_an_object_that_can_not_be_touched_is_a_finding_and_no_exception() -> None:
    (problem,) = find_unpicklable({"bad": Untouchable()}, name="state")
    assert problem.path == 'state["bad"]' and "not to be touched" in problem.reason


def test_slots_that_can_not_be_set_do_not_load() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        pickle.loads(pickle.dumps(SlotsCantBeSet(1)))
    (problem,) = find_unpicklable({"x": SlotsCantBeSet(1)}, name="state")
    assert problem.path == 'state["x"]' and "__setattr__" in problem.reason and problem.severity == "error"


def test_hooks_of_an_optimizer_are_a_loss() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert find_unpicklable(optimizer) == []
    optimizer.register_step_post_hook(lambda *_: None)
    (problem,) = find_unpicklable(optimizer)
    assert problem.severity == "loss" and "1 hook(s)" in problem.reason
    assert "_optimizer_step_post_hooks" in problem.reason


def _local(kind: str) -> Any:
    if kind == "enum":

        class Mode(enum.Enum):
            TRAIN = 1

        return Mode.TRAIN

    @dataclasses.dataclass
    class Settings:
        lr: float = 0.1

    return Settings()


@pytest.mark.parametrize("kind", ["enum", "dataclass"])
def test_a_local_class_is_said_to_be_in_the_file_where_it_is_written(kind: str) -> None:
    (problem,) = find_unpicklable({"x": _local(kind)})
    assert __file__ in problem.reason
    assert "enum.py" not in problem.reason and "dataclasses.py" not in problem.reason


def test_a_decorated_function_is_said_to_be_where_its_author_wrote_it() -> None:
    @torch.no_grad()
    def average(x: Any) -> Any:
        return x

    (problem,) = find_unpicklable({"fn": average})
    assert f"{__file__}:" in problem.reason and "_contextlib.py" not in problem.reason


@pytest.mark.parametrize("value", [b"", HUGE, -HUGE, ..., NotImplemented], ids=lambda value: str(type(value)))
def test_every_plain_value_that_weights_only_refuses_is_found(value: Any) -> None:
    state = {"a": value, "b": [(value,)], "c": OrderedDict(x=value), value: 1}
    (problem, *_) = find_unpicklable(state, name="state", weights_only=True)
    assert problem.path == 'state["a"]' and "refuses" in problem.reason
    left, _ = nanscan.pickling.drop_all(state, name="state", weights_only=True)
    assert left == {"b": [()], "c": {}}


def test_plain_values_that_weights_only_takes_are_no_problem() -> None:
    state = {"a": b"x", 1 << 60: -(1 << 1900), "c": ["", 0.5, None, True, 1j, bytearray()]}
    assert find_unpicklable(state, weights_only=True) == []
