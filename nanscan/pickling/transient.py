"""`TransientState`: attributes that are dropped when an object is pickled or copied, and made anew on loading."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from nanscan.errors import CheckpointError

__all__ = ["TransientState"]

_C = TypeVar("_C", bound=type)
_SPECIFICATION = "__transient_state__"  # in the namespace of every class that names attributes
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_STORES = ("_buffers", "_parameters", "_modules")  # where a torch module keeps what __setattr__ takes from it
_restoring = threading.local()


class TransientState:
    """Drop named attributes on pickling and copying, keep everything else, and make the named ones anew on loading.

    A lock, an open file or a cache in an object makes the whole object unpicklable, though nobody wants to save it.
    As a base class it takes a mapping, as a decorator keywords; either way each name comes with how to make it anew:
    a function or class called without arguments, a function of the instance, or None for None.

    Args:
        transient: as a class keyword beside the base class: attribute name -> how to make it anew. A subclass adds
            to what its bases name, or names one again to make it differently.
        **attributes: the same, of the decorator.

    Works with inheritance, `torch.nn.Module` (parameters, buffers and submodules may be named too), `__slots__`,
    dataclasses (frozen ones too), a class's own `__getstate__`, `__setstate__` and `__reduce__`, `pickle`,
    `torch.save`, `copy` and processes that multiprocessing starts. An attribute that is not there when the object is
    pickled is no error; it is made on loading all the same. They are made last, in the order of their naming, base
    classes first, and only where the class's own `__setstate__` has not made them already.

    Do not use the recipe `__reduce__ = lambda self: (cls, ())`, often given as a cure for "cannot pickle
    '_thread.RLock' object": it silences the error by saving *nothing*. Loading then calls `cls()`, and a model comes
    back with the weights of a fresh initialisation, without a word. `nanscan.find_unpicklable` reports it.

    Raises:
        TypeError: at the class: an entry is neither callable nor None, or needs more than the instance.
        CheckpointError: on loading: an attribute could not be made; names it, the class and the cause.

    >>> import copy
    >>> class Cache(TransientState, transient={"lock": threading.RLock, "hits": lambda self: [0] * self.size}):
    ...     def __init__(self, size):
    ...         self.size, self.lock, self.hits = size, threading.RLock(), [5] * size
    >>> copied = copy.deepcopy(Cache(2))
    >>> copied.size, copied.hits, copied.lock is not None
    (2, [0, 0], True)

    >>> @TransientState(lock=threading.RLock)
    ... class Counter:
    ...     def __init__(self):
    ...         self.lock, self.count = threading.RLock(), 3
    >>> copy.deepcopy(Counter()).count
    3
    """

    __slots__ = ()

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        if cls is TransientState:
            return _decorator(arguments, keywords)
        if sys.version_info < (3, 11):
            _install(cls, None)  # there dataclass(frozen=True, slots=True) puts its own __setstate__ over the hook
        make = super().__new__
        if make is not object.__new__:
            return make(cls, *arguments, **keywords)
        if (arguments or keywords) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        return make(cls)

    def __init_subclass__(cls, transient: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        _install(cls, transient)


def _decorator(arguments: tuple[Any, ...], attributes: Mapping[str, Any]) -> Callable[[_C], _C]:
    if arguments or not attributes:
        raise TypeError(
            "TransientState as a decorator names the attributes: @nanscan.TransientState(lock=threading.RLock); as a "
            'base class: class Cache(nanscan.TransientState, transient={"lock": threading.RLock})'
        )

    def decorate(cls: _C) -> _C:
        _install(cls, attributes)
        if not issubclass(cls, TransientState):  # a subclass may have a __setstate__ of its own
            cls.__init_subclass__ = classmethod(_init_subclass)  # type: ignore[assignment, arg-type]
        return cls

    return decorate


def _init_subclass(cls: Any, transient: Mapping[str, Any] | None = None, **keywords: Any) -> None:
    owner: Any = next(kind for kind in cls.__mro__[1:] if _is_ours(vars(kind).get("__init_subclass__")))
    super(owner, cls).__init_subclass__(**keywords)
    _install(cls, transient)


def _is_ours(method: object) -> bool:
    return getattr(method, "__func__", None) is _init_subclass


def _install(cls: type, transient: Mapping[str, Any] | None) -> None:
    """Put the two hooks of pickling on the class itself, around its own ones: those are the first to be called."""
    if transient is not None:
        setattr(cls, _SPECIFICATION, _checked(cls, transient))
    for name, wrapper in (("__reduce_ex__", _reducing), ("__setstate__", _restoring_of)):
        own = vars(cls).get(name)
        if not getattr(own, "_of_transient_state", False):
            setattr(cls, name, wrapper(own))


def _checked(cls: type, transient: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(transient, Mapping):
        raise TypeError(f"transient of {cls.__name__} must map names to how they are made, not {transient!r}")
    checked = {}
    for name, make in transient.items():
        if make is not None and not callable(make):
            raise TypeError(
                f"transient attribute '{name}' of {cls.__name__}: give a function or class that makes it, or None, "
                f"not {make!r}"
            )
        needed = _needed(make)
        if needed > 1:
            raise TypeError(
                f"transient attribute '{name}' of {cls.__name__}: its function needs {needed} arguments; it is called "
                "with none, or with the instance"
            )
        checked[_mangled(cls, name)] = make
    return checked


def _mangled(cls: type, name: str) -> str:
    """As Python spells `self.__name` inside the class."""
    private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if private else name


def _needed(make: Any) -> int:
    """How many arguments a call can't do without."""
    if make is None:
        return 0
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # of a builtin that does not tell
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.default is one.empty and one.kind in positional for one in parameters)


def _specification(kind: type) -> dict[str, Any]:
    """All names of a class and its bases, bases first."""
    merged: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        merged.update(vars(base).get(_SPECIFICATION, {}))
    return merged


def _next(hook: Any, instance: Any, name: str) -> Any:
    """What `super()` finds after the class that holds `hook`; searched, as a dataclass with slots is made twice."""
    rest = iter(type(instance).__mro__)
    for kind in rest:
        if vars(kind).get(name) is hook:
            break
    for kind in rest:
        if name in vars(kind):
            return vars(kind)[name].__get__(instance, type(instance))
    return None


class _Dropped:
    """Stands in a state that is no dict for an attribute that was dropped."""

    def __reduce__(self) -> str:
        return "_DROPPED"

    def __deepcopy__(self, memo: Any) -> _Dropped:
        return self


class _NoState(_Dropped):
    """The state of an object that has none: its own `__setstate__` is not called, as pickle would not."""

    def __reduce__(self) -> str:
        return "_NO_STATE"


_DROPPED, _NO_STATE = _Dropped(), _NoState()


def _reducing(own: Any) -> Any:
    """`__reduce_ex__`: what the class itself gives, less the transient attributes."""

    def __reduce_ex__(self: Any, protocol: int) -> Any:
        reduced = own(self, protocol) if own is not None else _next(__reduce_ex__, self, "__reduce_ex__")(protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 2:
            return reduced
        function, arguments, state, *rest = (*reduced, None)[: max(3, len(reduced))]
        return function, arguments, _without(self, state, _specification(type(self))), *rest

    return _marked(__reduce_ex__, own)


def _without(instance: Any, state: Any, names: Mapping[str, Any]) -> Any:
    if state is None:
        return _NO_STATE
    if isinstance(state, dict):
        return _dict_without(state, names)
    if (
        isinstance(state, tuple)
        and len(state) == 2
        and isinstance(state[1], dict)
        and isinstance(state[0], dict | None)
    ):
        return tuple(part if part is None else _dict_without(part, names) for part in state)
    if isinstance(state, (tuple, list)) and type(state) in (tuple, list):
        values = [value for name in names for value in [_held(instance, name)] if not isinstance(value, _PLAIN)]
        return type(state)(_DROPPED if any(item is value for value in values) else item for item in state)
    return state


def _dict_without(state: dict[Any, Any], names: Mapping[str, Any]) -> dict[Any, Any]:
    """A copy of the dict without the names; of a module's registered ones the registration stays."""
    kept = {key: value for key, value in state.items() if key not in names}
    for store in _STORES:
        inner = kept.get(store)
        if isinstance(inner, dict) and any(name in inner for name in names):
            kept[store] = type(inner)((key, None if key in names else value) for key, value in inner.items())
    return kept


def _restoring_of(own: Any) -> Any:
    """`__setstate__`: the class's own, or what pickle does without one; the outermost call makes the attributes."""

    def __setstate__(self: Any, state: Any) -> None:
        restore = functools.partial(own, self) if own is not None else _next(__setstate__, self, "__setstate__")
        active = _restoring.__dict__.setdefault("active", set())
        outermost = id(self) not in active
        active.add(id(self))
        try:
            if state is not _NO_STATE:
                (restore or functools.partial(_default_restore, self))(state)
        finally:
            if outermost:
                active.discard(id(self))
        if outermost:
            _make_all(self)

    return _marked(__setstate__, own)


def _marked(hook: Any, own: Any) -> Any:
    if own is not None:
        functools.update_wrapper(hook, own)
    hook._of_transient_state = True
    return hook


def _default_restore(instance: Any, state: Any) -> None:
    """As pickle and dataclasses do; written past `__setattr__`, which a frozen dataclass forbids."""
    if isinstance(state, list) and dataclasses.is_dataclass(instance):
        state = dict(zip((field.name for field in dataclasses.fields(instance)), state, strict=False))
        for name, value in state.items():
            object.__setattr__(instance, name, value)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        instance.__dict__.update(state)
    for name, value in (slots or {}).items():
        object.__setattr__(instance, name, value)


def _make_all(instance: Any) -> None:
    for name, make in _specification(type(instance)).items():
        if _held(instance, name) is not _DROPPED:
            continue  # its own __setstate__ has made it
        try:
            value = make if make is None else make(instance) if _needed(make) else make()
            if isinstance(instance, torch.nn.Module):
                setattr(instance, name, value)
            else:
                object.__setattr__(instance, name, value)
        except Exception as error:
            raise CheckpointError(
                f"cannot make the transient attribute '{name}' of {type(instance).__qualname__} anew: "
                f"{type(error).__name__}: {error}"
            ) from error


def _held(instance: Any, name: str) -> Any:
    """The instance's own value, past `__getattr__` and the defaults of its class; `_DROPPED` if there is none."""
    own = getattr(instance, "__dict__", {})
    if name in own:
        return own[name]
    for store in (own[key] for key in _STORES if isinstance(own.get(key), dict)):
        if store.get(name) is not None:
            return store[name]
    for kind in type(instance).__mro__:
        slot = vars(kind).get(name)
        if isinstance(slot, types.MemberDescriptorType):
            try:
                return slot.__get__(instance)
            except AttributeError:
                return _DROPPED
    return _DROPPED
