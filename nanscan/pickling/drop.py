"""A copy of an object without the places that can't be pickled; the object itself and its tensors stay as they are."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from nanscan.pickling.find import find_unpicklable
from nanscan.pickling.naming import Step
from nanscan.pickling.parts import own_attributes
from nanscan.pickling.problem import PickleProblem

__all__ = ["drop_all", "drop_unpicklable"]

_REMOVED = object()
_ROUNDS = 50  # each removes at least one place or ends it
_REGISTRIES = ("_modules", "_parameters", "_buffers")
_Tree = dict[Step, Any]


class _NotRebuilt(Exception):
    """This object can't be copied without the part: it goes as a whole."""


def drop_unpicklable(obj: Any, problems: Iterable[PickleProblem]) -> Any:
    """A copy of `obj` without the places of `problems` whose severity is `"error"`.

    Only what lies on the way to such a place is copied, one level deep: dicts, lists, tuples, sets, and objects with
    their attributes. Everything else is shared, tensors above all. Where an object can't be rebuilt without the part
    (an argument of a partial, what a reducer makes) the object is left out; a named tuple gets None in its place.

    Args:
        obj: what `find_unpicklable` was asked about.
        problems: its answer.

    Returns:
        The copy, or `obj` itself where nothing could be removed. A holder that is reached by a second way too, or that
        can't be saved without the part, still has to go: `drop_all` asks again until nothing is left to remove.

    >>> state = {"epoch": 3, "hooks": [len, lambda x: x]}
    >>> drop_unpicklable(state, find_unpicklable(state))
    {'epoch': 3, 'hooks': [<built-in function len>]}
    """
    tree: _Tree = {}
    for problem in problems:
        if problem.severity == "error":
            for steps in (problem.steps, *problem.also):
                _plant(tree, steps)
    if not tree:
        return obj
    copies: dict[int, Any] = {}
    try:
        left = _rebuilt(obj, tree, copies)
    except _NotRebuilt:
        return obj
    for copied in list(copies.values()):
        _lead_to_copies(copied, copies)
    return left


def drop_all(
    obj: Any, *, name: str, weights_only: bool = False, check_loading: bool = False
) -> tuple[Any, list[PickleProblem]]:
    """`drop_unpicklable`, until nothing is found any more.

    Args:
        obj: any state.
        name, weights_only, check_loading: as of `find_unpicklable`.

    Returns:
        The copy, and everything that was found on the way; an `"error"` that is found in the copy again could not be
        removed.

    >>> lock_holder = {"fn": lambda x: x}
    >>> drop_all({"a": lock_holder, "b": [lock_holder]}, name="state")[0]
    {'a': {}, 'b': [{}]}
    """
    found: list[PickleProblem] = []
    for _ in range(_ROUNDS):
        problems = find_unpicklable(obj, name=name, weights_only=weights_only, check_loading=check_loading)
        found += [problem for problem in problems if problem not in found]
        left = drop_unpicklable(obj, problems)
        if left is obj:
            break
        obj = left
    return obj, found


def _plant(tree: _Tree, steps: tuple[Step, ...]) -> None:
    """Mark a place as removed; what can't be reached by attributes and items is removed with its owner."""
    reached = steps[: next((i for i, step in enumerate(steps) if step[0] == "text"), len(steps))]
    for step in reached[:-1]:
        branch = tree.setdefault(step, {})
        if branch is _REMOVED:
            return
        tree = branch
    if reached:
        tree[reached[-1]] = _REMOVED


def _lead_to_copies(copied: Any, copies: dict[int, Any]) -> None:
    """A copy that refers to an original which was copied too (a cycle, a shared holder) refers to the copy instead."""
    own = copied if issubclass(type(copied), (dict, list)) else getattr(copied, "__dict__", {})
    for key, held in list(enumerate(own)) if isinstance(own, list) else list(own.items()):
        if id(held) in copies:
            own[key] = copies[id(held)]


def _rebuilt(value: Any, tree: _Tree, copies: dict[int, Any]) -> Any:
    new = _copied(value, {step: _changed(_at(value, step), branch, copies) for step, branch in tree.items()})
    copies[id(value)] = new
    return new


def _copied(value: Any, changes: dict[Step, Any]) -> Any:
    kind = type(value)
    if issubclass(kind, dict) and all(step[0] != "attr" for step in changes):
        return _dict_without(value, changes)
    if issubclass(kind, (list, tuple, set, frozenset, collections.deque)) and _by_position(kind, changes):
        return _sequence_without(value, kind, changes)
    if any(step[0] not in ("attr", "item") for step in changes):
        raise _NotRebuilt
    return _object_without(value, kind, changes)


def _by_position(kind: type, changes: dict[Step, Any]) -> bool:
    return hasattr(kind, "_fields") or all(step[0] != "attr" for step in changes)


def _changed(held: Any, branch: Any, copies: dict[int, Any]) -> Any:
    if branch is _REMOVED:
        return _REMOVED
    try:
        return _rebuilt(held, branch, copies)
    except _NotRebuilt:
        return _REMOVED


def _at(value: Any, step: Step) -> Any:
    kind, key = step
    if kind == "attr":
        return _attribute(value, key)
    if kind == "item" and isinstance(value, nn.Module):
        return _attribute(value, str(key))
    try:
        if kind == "key":
            return list(value)[key]
        return list(value.values())[key] if kind == "value" else value[key]
    except Exception as error:
        raise _NotRebuilt from error


def _attribute(value: Any, name: str) -> Any:
    own = own_attributes(value)
    if name in own:
        return own[name]
    for registry in _REGISTRIES if isinstance(value, nn.Module) else ():
        if name in own[registry]:
            return own[registry][name]
    raise _NotRebuilt


def _dict_without(value: dict[Any, Any], changes: dict[Step, Any]) -> Any:
    new = copy.copy(value)
    keys = list(value)
    for (kind, key), change in changes.items():
        found = key if kind == "item" else keys[key]
        if kind == "key" and change is not _REMOVED:
            new[change] = new.pop(found)
        elif change is _REMOVED:
            new.pop(found, None)
        else:
            new[found] = change
    return new


def _sequence_without(value: Any, kind: Any, changes: dict[Step, Any]) -> Any:
    fields: Any = getattr(kind, "_fields", None)
    by_position = {fields.index(key) if step == "attr" else key: change for (step, key), change in changes.items()}
    members = [by_position.get(i, held) for i, held in enumerate(value)]
    if fields is not None:
        return tuple.__new__(kind, [None if held is _REMOVED else held for held in members])
    members = [held for held in members if held is not _REMOVED]
    if kind in (list, tuple, set, frozenset):
        return kind(members)
    if issubclass(kind, (tuple, frozenset)):
        raise _NotRebuilt
    new = copy.copy(value)
    new.clear()
    new.update(members) if issubclass(kind, set) else new.extend(members)
    return new


def _object_without(value: Any, kind: Any, changes: dict[Step, Any]) -> Any:
    """A blank instance with the same attributes, less those that go."""
    if not hasattr(value, "__dict__") and not own_attributes(value):
        raise _NotRebuilt
    try:
        new = kind.__new__(kind)
        held = {k: v for k, v in own_attributes(value).items()}
        if isinstance(value, nn.Module):
            held.update((name, copy.copy(held[name])) for name in _REGISTRIES)
        for (_, key), change in changes.items():
            _change(held, str(key), change)
        for name, attribute in held.items():
            object.__setattr__(new, name, attribute)
    except Exception as error:
        raise _NotRebuilt from error
    return new


def _change(held: dict[str, Any], name: str, change: Any) -> None:
    owner = held if name in held else next(held[r] for r in _REGISTRIES if r in held and name in held[r])
    if change is _REMOVED:
        del owner[name]
    else:
        owner[name] = change
