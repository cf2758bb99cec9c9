"""What pickle would save of one object, and where each part of it is reached from that object."""

from __future__ import annotations

import collections
import copyreg
import enum
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from nanscan import paddle_objects
from nanscan.pickling import paddle_kinds
from nanscan.pickling.light import PROTOCOL, quiet
from nanscan.pickling.naming import Step, item_step

__all__ = ["ATOMS", "CONTAINERS", "NEW", "Part", "Saved", "contents", "has", "own_attributes", "parts", "saved"]

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, type(...), type(NotImplemented)})
CONTAINERS = frozenset({list, tuple, dict, set, frozenset})
_CHILD_LISTS = (nn.Sequential, nn.ModuleList, nn.ParameterList)
_CHILD_DICTS = (nn.ModuleDict, nn.ParameterDict)
NEW: tuple[Any, ...] = (copyreg.__newobj__, copyreg.__newobj_ex__)  # type: ignore[attr-defined]
_MISSING = object()

Part = tuple[tuple[Step, ...], Any]


class Saved(NamedTuple):
    """An object as pickle takes it apart: `func(*args)` makes it, the rest fills it."""

    func: Any
    args: tuple[Any, ...]
    state: Any = None
    items: Any = None
    pairs: Any = None
    setter: Any = None


def saved(value: Any, table: Any) -> Saved | str:
    """The answer of the object's reducer; a string is the name that it is saved under.

    Raises:
        BaseException: whatever the reducer raises; `TypeError` if its answer is none.
    """
    reducer = table.get(type(value))
    with quiet():
        answer = reducer(value) if reducer is not None else value.__reduce_ex__(PROTOCOL)
    if isinstance(answer, str):
        return answer
    if type(answer) is not tuple or not 2 <= len(answer) <= 6 or type(answer[1]) is not tuple:
        raise TypeError(f"its __reduce__ returned {type(answer).__name__}, not a name or a tuple (callable, args, …)")
    if not callable(answer[0]):
        raise TypeError(f"its __reduce__ returned a {type(answer[0]).__name__} to be called, which is not callable")
    return Saved(*answer)


def contents(value: Any, is_odd: Callable[[Any], bool] | None = None) -> Iterator[Part]:
    """The parts of a list, tuple, dict, set or frozenset, or of an array of objects; of atoms the odd ones only."""
    kind = type(value)
    if kind is dict:
        for position, (key, held) in enumerate(value.items()):
            if type(key) not in ATOMS or (is_odd is not None and is_odd(key)):
                yield (("key", position),), key
            if type(held) not in ATOMS or (is_odd is not None and is_odd(held)):
                yield (item_step(key, position),), held
    elif issubclass(kind, np.ndarray):
        if value.dtype == object:
            yield from (((("index", index),), held) for index, held in np.ndenumerate(value))
    else:
        step = "key" if kind in (set, frozenset) else "item"
        for position, held in enumerate(value):
            if type(held) not in ATOMS or (is_odd is not None and is_odd(held)):
                yield ((step, position),), held


def parts(value: Any, whole: Saved) -> Iterator[Part]:
    """The parts of any other object, by attribute, item or key where there is one."""
    kind = type(value)
    names = _Attributes(value)
    if not issubclass(type(whole.func), type) and whole.func not in NEW:
        yield (("text", f".__reduce_ex__({PROTOCOL})[0]"),), whole.func
    yield from _arguments(value, kind, whole, names)
    if whole.state is not None:
        yield from _state(value, whole.state, names)
    for position, held in enumerate(() if whole.items is None else whole.items):
        yield (("key", position) if issubclass(kind, (set, frozenset)) else ("item", position),), held
    for position, (key, held) in enumerate(() if whole.pairs is None else whole.pairs):
        yield (("key", position),), key
        yield (item_step(key, position),), held
    if whole.setter is not None:
        yield (("text", f".__reduce_ex__({PROTOCOL})[5]"),), whole.setter


class _Attributes:
    """The names of an object's own attributes, found by identity of what they hold; built when first needed."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._by_id: dict[int, str] | None = None

    def of(self, held: Any) -> str | None:
        if self._by_id is None:
            self._by_id = {}
            own = own_attributes(self._value)
            children = own.get("_modules") if isinstance(self._value, nn.Module) else None
            for name, attribute in (*own.items(), *(children or {}).items()):
                self._by_id.setdefault(id(attribute), name)
        return self._by_id.get(id(held))


def own_attributes(value: Any) -> dict[str, Any]:
    """What an object holds in `__dict__`, slots and the fields of its builtin kind, without running its code."""
    found: dict[str, Any] = {}
    for name in _fields(type(value)):
        held = _builtin_getattr(value, name)
        if held is not _MISSING:
            found[name] = held
    try:
        own = object.__getattribute__(value, "__dict__")
    except Exception:
        own = None
    if type(own) is dict:
        found.update((name, held) for name, held in own.items() if type(name) is str)
    return found


def _fields(kind: type) -> tuple[str, ...]:
    if issubclass(kind, functools.partial):
        return ("func", "args", "keywords")
    if kind is types.MethodType or kind is types.BuiltinMethodType:
        return ("__self__",)
    if issubclass(kind, collections.defaultdict):
        return ("default_factory",)
    if issubclass(kind, BaseException):
        return ("args",)
    if issubclass(kind, enum.Enum):
        return ("value",)
    fields = getattr(kind, "_fields", None)
    if issubclass(kind, tuple) and type(fields) is tuple:
        return fields
    return tuple(copyreg._slotnames(kind))  # type: ignore[attr-defined]


def _builtin_getattr(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except Exception:
        return _MISSING


def _arguments(value: Any, kind: type, whole: Saved, names: _Attributes) -> Iterator[Part]:
    skip = 1 if whole.func in NEW and whole.args else 0  # the class itself; judged with the object
    extra: tuple[Step, ...] = (("text", f".__reduce_ex__({PROTOCOL})[1]"),)
    for position, held in enumerate(whole.args):
        if type(held) in ATOMS or position < skip or held is kind:
            continue
        name = names.of(held)
        if name is not None:
            yield (("attr", name),), held
        elif issubclass(kind, BaseException) and position < len(value.args) and value.args[position] is held:
            yield (("attr", "args"), ("item", position)), held
        else:
            yield from _one_deeper(held, names, (*extra, ("item", position)))


def _one_deeper(held: Any, names: _Attributes, otherwise: tuple[Step, ...]) -> Iterator[Part]:
    """A tuple or dict that was made for the reducer's answer: its members may be attributes."""
    kind = type(held)
    if kind in (tuple, list) and any(names.of(part) for part in held):
        for position, part in enumerate(held):
            name = names.of(part) if type(part) not in ATOMS else None
            yield ((("attr", name),) if name else (*otherwise, ("item", position))), part
    elif kind is dict:
        for position, (key, part) in enumerate(held.items()):
            name = names.of(part) if type(part) not in ATOMS else None
            yield (*otherwise, ("key", position)), key
            yield ((("attr", name),) if name else (*otherwise, item_step(key, position))), part
    else:
        yield otherwise, held


def _state(value: Any, state: Any, names: _Attributes) -> Iterator[Part]:
    if issubclass(type(value), functools.partial) and type(state) is tuple:
        yield from _partial_state(value)
        return
    plain = not has(type(value), "__getstate__", nn.Module) and not has(type(value), "__setstate__", nn.Module)
    if type(state) is tuple and len(state) == 2 and (plain or all(type(s) in (dict, type(None)) for s in state)):
        for one in state:
            yield from _state_dict(value, one or {}, names)
    elif type(state) is dict:
        yield from _state_dict(value, state, names)
    elif type(state) not in ATOMS:
        name = names.of(state)
        otherwise: tuple[Step, ...] = (("text", ".__getstate__()"),)
        yield from ([((("attr", name),), state)] if name else _one_deeper(state, names, otherwise))


def _partial_state(value: Any) -> Iterator[Part]:
    yield (("attr", "func"),), value.func
    for position, held in enumerate(value.args):
        yield (("attr", "args"), ("item", position)), held
    for position, (key, held) in enumerate(value.keywords.items()):
        yield (("attr", "keywords"), item_step(key, position)), held
    for name, held in getattr(value, "__dict__", {}).items():
        yield (("attr", name),), held


def _state_dict(value: Any, state: dict[Any, Any], names: _Attributes) -> Iterator[Part]:
    is_module, is_layer = issubclass(type(value), nn.Module), paddle_objects.is_layer(value)
    plain = not has(type(value), "__getstate__", nn.Module)
    own = own_attributes(value)
    for position, (key, held) in enumerate(state.items()):
        if type(key) not in ATOMS:
            yield (("text", ".__getstate__()"), ("key", position)), key
        if type(held) in ATOMS:
            continue
        if is_module and key in ("_modules", "_parameters", "_buffers") and issubclass(type(held), dict):
            yield from _registered(value, held)
        elif is_layer and key in paddle_kinds.REGISTRIES and issubclass(type(held), dict):
            yield from paddle_kinds.registered(value, key, held)
        elif type(key) is str and own.get(key, held if plain else None) is held:
            yield (("attr", key),), held
        elif key == "__dict__" and _same_members(own, held):
            yield from (((("attr", name),), part) for name, part in held.items() if type(part) not in ATOMS)
        elif type(key) is str and _same_members(own.get(key), held):
            yield (("attr", key),), held
        else:
            name = names.of(held)
            yield ((("attr", name),) if name else (("text", ".__getstate__()"), item_step(key, position))), held


def _same_members(whole: Any, part: Any) -> bool:
    """Whether a dict that was made for the reducer's answer holds what another, which can be reached, holds too."""
    return type(part) is dict and type(whole) is dict and all(whole.get(key) is held for key, held in part.items())


def _registered(module: Any, held: dict[str, Any]) -> Iterator[Part]:
    """Children, parameters and buffers, as one reaches them."""
    kind = type(module)
    for name, child in held.items():
        if child is None:
            continue
        if issubclass(kind, _CHILD_LISTS) and name.isdigit():
            yield (("item", int(name)),), child
        elif issubclass(kind, _CHILD_DICTS):
            yield (("item", name),), child
        elif str(name).isidentifier():
            yield (("attr", name),), child
        else:
            yield (
                (("text", f'.get_submodule("{name}")' if isinstance(child, nn.Module) else f'.__dict__["{name}"]'),),
                child,
            )


def has(kind: type, name: str, besides: type = object) -> bool:
    """Whether a class, other than `object` and `besides`, defines a special method."""
    found = next((c for c in kind.__mro__ if name in c.__dict__), object)
    return found not in (object, besides)
