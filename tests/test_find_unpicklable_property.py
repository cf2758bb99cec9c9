"""Random nested objects with planted offenders: exactly those are found, and [] agrees with pickle itself."""

from __future__ import annotations

import collections
import copy
import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nanscan import find_unpicklable
from nanscan.pickling import drop_unpicklable
from tests.unpicklable import (
    Box,
    CarefulProxy,
    Config,
    Drops,
    FrozenConfig,
    Hostile,
    Members,
    Named,
    Pair,
    Proxy,
    Rebuilt,
    Renames,
    Slotted,
    StateNumber,
)

_settings = settings(max_examples=100, deadline=None, derandomize=True)

_GOOD: list[Callable[[], Any]] = [
    lambda: 3,
    lambda: "text",
    lambda: torch.ones(2),
    lambda: len,
    lambda: Drops(),
    lambda: Hostile(),
    lambda: nn.Linear(1, 1),
    lambda: CarefulProxy(3),
    dict,
]
_BAD: list[Callable[[], Any]] = [
    threading.Lock,
    threading.Event,
    lambda: lambda: 1,
    lambda: (i for i in range(3)),
    lambda: Proxy(3),
    StateNumber,
    lambda: memoryview(b"x"),
]


def _module(a: Any, b: Any) -> Any:
    module = nn.Sequential(nn.ReLU())
    module.a, module.b = a, b  # a module among them becomes a child
    return module


_HOLDERS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: [a, b],
    lambda a, b: (a, b),
    lambda a, b: {"a": a, 2: b},
    lambda a, b: {"deep": {"er": a}, ("k", 1): b},
    lambda a, b: collections.OrderedDict(a=a, b=b),
    lambda a, b: collections.deque([a, b]),
    lambda a, b: collections.defaultdict(list, a=a, b=b),
    lambda a, b: functools.partial(print, a, end=b),
    lambda a, b: Box(a=a, b=b),
    lambda a, b: Slotted(a, b),
    lambda a, b: Config(fn=a, lr=b),
    lambda a, b: FrozenConfig(fn=[a, b]),
    lambda a, b: Pair(a, b),
    lambda a, b: Members([a, b]),
    lambda a, b: Named(a=a, b=b),
    lambda a, b: Renames([a, b]),
    lambda a, b: Rebuilt((a, b)),
    _module,
]


@st.composite
def _planted(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    """An object and the offenders in it."""
    planted: list[Any] = []

    def part(depth: int) -> Any:
        choice = draw(st.integers(0, 9))
        if depth == 0 or choice < 3:
            return draw(st.sampled_from(_GOOD))()
        if choice == 3:
            planted.append(draw(st.sampled_from(_BAD))())
            return planted[-1]
        return draw(st.sampled_from(_HOLDERS))(part(depth - 1), part(depth - 1))

    return draw(st.sampled_from(_HOLDERS))(part(4), part(4)), planted


def _round_trip_works(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


@_settings
@given(_planted())
def test_the_places_found_are_those_planted(case: tuple[Any, list[Any]]) -> None:
    obj, planted = case
    problems = find_unpicklable(obj, name="obj", check_loading=False)
    found = [eval(problem.path, {"obj": obj}) for problem in problems]
    assert {id(value) for value in found} == {id(value) for value in planted}
    assert len(found) == len(planted)
    assert all(problem.severity == "error" for problem in problems)


@_settings
@given(_planted())
def test_empty_means_that_it_pickles_and_loads(case: tuple[Any, list[Any]]) -> None:
    obj, _ = case
    assert (find_unpicklable(obj, check_loading=False) == []) == _round_trip_works(obj)


@_settings
@given(_planted())
def test_what_is_left_after_dropping_pickles_and_the_object_is_as_it_was(case: tuple[Any, list[Any]]) -> None:
    obj, planted = case
    left = obj
    for _ in range(5):
        problems = find_unpicklable(left, check_loading=False)
        if not problems:
            break
        left = drop_unpicklable(left, problems)
    assert _round_trip_works(left) or left is obj  # a partial or a constructor's argument can't be left out
    assert len(find_unpicklable(obj, check_loading=False)) == len(planted)


@_settings
@given(_planted(), st.integers(0, 2))
def test_shared_and_cyclic_parts_change_nothing(case: tuple[Any, list[Any]], copies: int) -> None:
    obj, planted = case
    shared: dict[str, Any] = {"x": obj, "again": [obj] * copies}
    shared["me"] = shared
    problems = find_unpicklable(shared, name="obj", check_loading=False)
    assert len(problems) == len(planted)
    assert (problems == []) == _round_trip_works(shared)
    assert copy.copy(shared)["x"] is obj
