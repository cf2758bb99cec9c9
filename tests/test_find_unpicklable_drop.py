"""`drop_unpicklable`: a copy without what can't be saved; what the caller holds stays as it is."""

from __future__ import annotations

import collections
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn

from nanscan import find_unpicklable
from nanscan.pickling import PickleProblem, drop_all, drop_unpicklable
from tests.unpicklable import Box, Config, Named, Pair, Rebuilt, Slotted

_BAD = threading.Lock()


def _dropped(obj: Any) -> Any:
    left, problems = drop_all(obj, name="obj")
    assert problems
    assert find_unpicklable(left, check_loading=False) == []
    return left


@pytest.mark.parametrize(
    ("obj", "left"),
    [
        ({"a": 1, "b": _BAD}, {"a": 1}),
        ({1: {"deep": [1, _BAD, 2]}}, {1: {"deep": [1, 2]}}),
        ({"t": (1, _BAD)}, {"t": (1,)}),
        ({"s": {1, _BAD}}, {"s": {1}}),
        ({(1, _BAD): 2, "k": 3}, {(1,): 2, "k": 3}),
        ({_BAD: 2, "k": 3}, {"k": 3}),
        (collections.OrderedDict(a=1, b=_BAD), collections.OrderedDict(a=1)),
        (collections.deque([1, _BAD], maxlen=5), collections.deque([1])),
        (Named(a=1, b=_BAD), Named(a=1)),
        ([Pair(1, _BAD)], [Pair(1, None)]),
        ({"r": Rebuilt(_BAD), "k": 1}, {"k": 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_offending_entries_are_gone_and_the_rest_is_there(obj: Any, left: Any) -> None:
    before = pickle.dumps(left)
    assert _dropped(obj) == left
    assert type(_dropped(obj)) is type(left) and before


def test_attributes_of_objects_are_left_out() -> None:
    obj = {"config": Config(fn=_BAD, lr=0.5), "slots": Slotted(1, _BAD), "box": Box(a=1, b=Box(c=_BAD, d=2))}
    left = _dropped(obj)
    assert left["config"].lr == 0.5 and left["slots"].left == 1 and left["box"].b.d == 2
    assert not hasattr(left["slots"], "right") and not hasattr(left["box"].b, "c")
    assert obj["config"].fn is _BAD and obj["slots"].right is _BAD and obj["box"].b.c is _BAD  # type: ignore[attr-defined]


def test_a_model_loses_the_attribute_and_shares_its_weights() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    model[1][0].lock = _BAD
    model[0].register_forward_hook(lambda *_: None)
    left = _dropped(model)
    assert left is not model and left[1][0] is not model[1][0]
    assert left[1][0].weight is model[1][0].weight and left[0].weight is model[0].weight
    assert not hasattr(left[1][0], "lock") and not left[0]._forward_hooks
    assert model[1][0].lock is _BAD and len(model[0]._forward_hooks) == 1
    assert torch.equal(pickle.loads(pickle.dumps(left))(torch.ones(1, 2)), left(torch.ones(1, 2)))


def test_tensors_and_untouched_parts_are_shared() -> None:
    weights, untouched = torch.ones(3), {"a": [1]}
    left = _dropped({"w": weights, "u": untouched, "bad": _BAD})
    assert left["w"] is weights and left["u"] is untouched


def test_what_is_reached_by_several_ways_is_gone_from_all_of_them() -> None:
    holder = {"fn": lambda: 1, "kept": 2}
    left = _dropped({"a": holder, "b": [holder, {"c": holder}], "lock": _BAD, "again": [_BAD, 1]})
    assert left == {"a": {"kept": 2}, "b": [{"kept": 2}, {"c": {"kept": 2}}], "again": [1]}


def test_cycles_are_cut_where_they_lead_to_what_is_dropped() -> None:
    state: dict[str, Any] = {"lock": _BAD, "epoch": 3}
    state["me"], state["list"] = state, [state]
    left, problems = drop_all(state, name="state")
    assert "lock" not in left and left["epoch"] == 3 and left["me"] is left
    assert find_unpicklable(left) == [] and len(problems) < 5


def test_losses_are_kept() -> None:
    state = {"loss": torch.ones(2, requires_grad=True) * 2}
    assert drop_unpicklable(state, find_unpicklable(state)) is state


def test_what_can_not_be_removed_is_returned_as_it_is() -> None:
    assert drop_unpicklable(_BAD, find_unpicklable(_BAD)) is _BAD
    assert drop_unpicklable([1], [PickleProblem("obj", "list", "r", "f")]) == [1]
