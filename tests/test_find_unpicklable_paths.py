"""Paths: each can be typed, and leads to the very object; every place is found once, under its shortest path."""

from __future__ import annotations

import collections
import functools
import pickle
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nanscan import find_unpicklable
from tests.unpicklable import (
    BadMessage,
    Box,
    Colour,
    Config,
    Drops,
    Endless,
    EndlessTree,
    FrozenConfig,
    Hostile,
    Members,
    Methods,
    Named,
    Node,
    Pair,
    Rebuilt,
    Renames,
    Slotted,
    SlottedAndMore,
)

_BAD = threading.Lock()


def _object_array() -> Any:
    array = np.full((2, 2), None, dtype=object)
    array[1, 0] = _BAD
    return array


def _tensor_with_attribute() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.note = _BAD  # type: ignore[attr-defined]
    return tensor


_PLACES: list[tuple[str, Any, str]] = [
    ("dict value", {"hparams": _BAD}, 'x["hparams"]'),
    ("dict value under a number", {3: {None: _BAD}}, "x[3][None]"),
    ("dict value under a tuple", {(1, "a"): _BAD}, 'x[(1, "a")]'),
    ("dict value under an enum member", {Colour.RED: _BAD}, "x[Colour.RED]"),
    ("dict value under a dtype", {torch.float16: _BAD}, "x[torch.float16]"),
    ("dict value under an object", {Methods(): _BAD}, "list(x.values())[0]"),
    ("dict value under a key with quotes", {'a"b\n': _BAD}, "x['a\"b\\n']"),
    ("dict key", {1: 2, (3, _BAD): 4}, "list(x)[1][1]"),
    ("list", [1, [2, _BAD]], "x[1][1]"),
    ("tuple", (1, (_BAD,)), "x[1][0]"),
    ("set", {_BAD}, "list(x)[0]"),
    ("frozenset", frozenset({_BAD}), "list(x)[0]"),
    ("deque", collections.deque([1, _BAD]), "x[1]"),
    ("ordered dict", collections.OrderedDict(a=_BAD), 'x["a"]'),
    ("defaultdict", collections.defaultdict(list, a=_BAD), 'x["a"]'),
    ("default factory", collections.defaultdict(Pair(_BAD, 1).count), "x.default_factory.__self__.first"),
    ("chain map", collections.ChainMap({}, {"a": _BAD}), 'x.maps[1]["a"]'),
    ("user dict", collections.UserDict(a=_BAD), 'x.data["a"]'),
    ("dict subclass", Named(a=_BAD), 'x["a"]'),
    ("list subclass", Members([1, _BAD]), "x[1]"),
    ("attribute", Box(inner=Box(lock=_BAD)), "x.inner.lock"),
    ("attribute with an odd name", Box(**{"a b": _BAD}), 'x.__dict__["a b"]'),
    ("namespace", types.SimpleNamespace(a=_BAD), "x.a"),
    ("slots", Slotted(1, _BAD), "x.right"),
    ("slots and attributes", SlottedAndMore(1, 2, _BAD), "x.more"),
    ("dataclass", Config(fn=_BAD), "x.fn"),
    ("frozen dataclass", FrozenConfig(fn=_BAD), "x.fn"),
    ("namedtuple", Pair(1, _BAD), "x.second"),
    ("exception", ValueError("x", _BAD), "x.args[1]"),
    ("partial's function", functools.partial(Rebuilt(_BAD).__init__), "x.func.__self__.inner"),  # type: ignore[misc]
    ("partial's arguments", functools.partial(print, 1, _BAD), "x.args[1]"),
    ("partial's keywords", functools.partial(print, end=_BAD), 'x.keywords["end"]'),
    ("bound method", Box(lock=_BAD).__init__, "x.__self__.lock"),  # type: ignore[misc]
    ("constructor's argument", Rebuilt(_BAD), "x.inner"),
    ("state under another name", Renames(_BAD), "x.inner"),
    ("object array", _object_array(), "x[1, 0]"),
    ("attribute of a tensor", _tensor_with_attribute(), "x.note"),
]


@pytest.mark.parametrize(("obj", "path"), [p[1:] for p in _PLACES], ids=[p[0] for p in _PLACES])
def test_path_is_as_typed_and_leads_to_the_object(obj: Any, path: str) -> None:
    (problem,) = find_unpicklable(obj, name="x")
    assert problem.path == path
    assert eval(problem.path, {"x": obj, "torch": torch, "Colour": Colour}) is _BAD


def _model() -> Any:
    model = nn.Module()
    model.encoder = nn.Module()
    model.encoder.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
    model.encoder.heads = nn.ModuleDict({"a": nn.Sequential(nn.ReLU(), nn.ReLU())})
    model.encoder.odd = nn.Module()
    model.encoder.odd.add_module("0", nn.ReLU())
    model.weights = nn.ParameterList([torch.ones(1), torch.ones(1)])
    return model


@pytest.mark.parametrize(
    "owner",
    [
        "model",
        "model.encoder.layers[3]",
        'model.encoder.heads["a"][1]',
        'model.encoder.odd.get_submodule("0")',
        "model.encoder.layers[2].weight",
        "model.weights[1]",
    ],
)
def test_path_in_a_module_goes_as_one_reaches_it(owner: str) -> None:
    model = _model()
    eval(owner)._lock = _BAD
    (problem,) = find_unpicklable(model)
    assert problem.path == f"{owner}._lock"


def test_hooks_are_found_under_their_number() -> None:
    model = nn.Linear(2, 2)
    model.register_forward_hook(print)  # importable: no problem
    handle = model.register_forward_hook(lambda *_: None)
    model.register_forward_pre_hook(lambda *_: None)
    model.register_full_backward_hook(lambda *_: None)
    model.register_state_dict_post_hook(lambda *_: None)
    paths = [problem.path for problem in find_unpicklable(model)]
    assert f"model._forward_hooks[{handle.id}]" in paths and len(paths) == 4
    assert all(eval(path, {"model": model}).__name__ == "<lambda>" for path in paths)
    assert all("remove the hook" in problem.fix for problem in find_unpicklable(model))


def test_the_root_is_called_as_the_caller_calls_it() -> None:
    my_net = nn.Linear(2, 2)
    my_net.lock = _BAD
    assert find_unpicklable(my_net)[0].path == "my_net.lock"
    assert find_unpicklable(my_net, name="net")[0].path == "net.lock"
    assert find_unpicklable(Box(lock=_BAD))[0].path == "obj.lock"
    assert find_unpicklable({"lock": _BAD})[0].path == 'state["lock"]'


def test_one_object_at_two_places_is_reported_once_with_the_shortest_path() -> None:
    lock = threading.Lock()
    state = {"deep": {"deeper": {"lock": lock}}, "lock": lock}
    (problem,) = find_unpicklable(state)
    assert problem.path == 'state["lock"]'
    assert 'also at state["deep"]["deeper"]["lock"]' in problem.reason


@pytest.mark.parametrize("obj", [None, 3, "x", b"x", 1.5, (), ..., NotImplemented, int, len, {}, set()], ids=repr)
def test_plain_values_are_fine_by_themselves(obj: Any) -> None:
    assert find_unpicklable(obj) == []


def test_cycles_end() -> None:
    state: dict[str, Any] = {"lock": threading.Lock(), "list": []}
    state["self"] = state
    state["list"].append(state["list"])
    box = Box(state=state)
    box.me = box  # type: ignore[attr-defined]
    assert [problem.path for problem in find_unpicklable(box)] == ['box.state["lock"]']
    del state["lock"]
    assert find_unpicklable(box) == []


def test_what_getstate_leaves_out_is_no_problem() -> None:
    assert find_unpicklable(Drops()) == []


@pytest.mark.parametrize("levels", [30_000, 100_000])  # newer Pythons pickle a few thousand
def test_too_deep_nesting_is_a_problem_with_its_depth(levels: int) -> None:
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    state = {"tree": nested}
    with pytest.raises(RecursionError):
        pickle.dumps(state)
    (problem,) = find_unpicklable(state)
    assert problem.path == 'state["tree"]' and f"{levels + 1} levels" in problem.reason


def test_deep_nesting_does_not_hide_what_is_at_its_bottom() -> None:
    nested: list[Any] = [threading.Lock()]
    for _ in range(50_000):
        nested = [nested]
    problems = find_unpicklable(nested)
    assert {problem.type for problem in problems} == {"_thread.lock", "list"}


def test_a_linked_list_is_as_deep_as_it_is_long_even_if_a_list_holds_every_node() -> None:
    nodes = [Node() for _ in range(5_000)]
    for before, after in zip(nodes, nodes[1:], strict=False):
        before.next = after
    (problem,) = find_unpicklable(nodes)
    assert "levels deep" in problem.reason and problem.type == "tests.unpicklable.Node"


@pytest.mark.parametrize("kind", [Endless, EndlessTree])
def test_a_reducer_without_end_is_told(kind: type) -> None:
    (problem,) = find_unpicklable({"tree": kind()}, name="state")
    assert problem.path == 'state["tree"]' and "without end" in problem.reason


def test_objects_that_raise_when_looked_at_are_left_in_peace() -> None:
    hostile = Hostile()
    state = {"a": hostile, "b": [hostile, {hostile}], "lock": threading.Lock(), hostile: 1}
    assert [problem.path for problem in find_unpicklable(state)] == ['state["lock"]']


def test_an_exception_without_a_message_does_not_take_the_diagnosis_down() -> None:
    (problem,) = find_unpicklable([BadMessage()])
    assert "Unprintable" in problem.reason and "can't be shown" in problem.reason


def test_the_object_is_unchanged_afterwards() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].lock = _BAD
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    weights = [p.clone() for p in model.parameters()]
    find_unpicklable(model)
    find_unpicklable(model, for_process=True)
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert before.keys() == after.keys()
    for name, attributes in before.items():
        assert attributes.keys() == after[name].keys()
        assert all(after[name][key] is value for key, value in attributes.items())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert not any(p.is_shared() for p in model.parameters())


def test_problem_says_itself_in_a_line_and_as_json() -> None:
    (problem,) = find_unpicklable({"lock": _BAD})
    assert problem.describe() == str(problem) == f"{problem.path} ({problem.type}): {problem.reason}; {problem.fix}"
    assert problem.to_dict() == {
        "path": 'state["lock"]',
        "type": "_thread.lock",
        "reason": problem.reason,
        "fix": problem.fix,
        "severity": "error",
    }
    assert pickle.loads(pickle.dumps(problem)) == problem
