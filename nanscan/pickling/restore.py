"""What loading would do with an object, as far as it can be told here; what can't is left to a subprocess."""

from __future__ import annotations

import enum
import functools
import types
from typing import Any

import torch
from torch import nn

from nanscan.pickling.parts import ATOMS, CONTAINERS, NEW, Saved, contents, has, own_attributes
from nanscan.pickling.trust import own_hook, trusted

__all__ = ["holds_itself_as_key", "refuses_to_be_saved", "refuses_to_copy", "refuses_to_load", "unsettled"]

_NO_STATE = object()
_NEEDS_GROUP = (
    "it loads only where torch.distributed's default process group has been initialised",
    "save model.module.state_dict(): the inner model's, whose keys have no 'module.' in front",
)
_GUARD = (
    "let __getattr__ raise AttributeError for names that start with '__' and for those that it reads itself: "
    "if name.startswith('__') or name == 'inner': raise AttributeError(name)"
)


def refuses_to_load(value: Any, whole: Saved) -> tuple[str, str] | None:
    """(reason, fix) if loading is known to fail although saving works."""
    if type(value) is types.MethodType:
        return _lost_method(value)
    if issubclass(type(value), enum.Enum):
        return _lost_member(value, whole)
    if whole.state is None:
        return None
    if issubclass(type(value), nn.parallel.DistributedDataParallel):
        return _NEEDS_GROUP
    return _delegates_forever(value, whole) or _strange_state(value, whole)


def _lost_method(method: types.MethodType) -> tuple[str, str] | None:
    name = getattr(method.__func__, "__name__", "")
    owner: Any = method.__self__
    kinds = [*type(owner).__mro__, *(owner.__mro__ if issubclass(type(owner), type) else ())]
    if any(name in vars(kind) for kind in kinds) or name in getattr(owner, "__dict__", {}):
        return None
    return (
        f"the method is saved as attribute '{name}' of its object, which has none of that name: loading fails",
        "bind the function to its own name on the class",
    )


def _lost_member(member: enum.Enum, whole: Saved) -> tuple[str, str] | None:
    """An enum's members are saved by value and looked up by it on loading."""
    if whole.func is not type(member) or not _unequal_to_its_copy(member._value_):
        return None
    return (
        f"an enum's member is saved by its value, and this value, a {type(member._value_).__name__}, is not equal to "
        "its own copy: loading fails with ValueError",
        "give the class __reduce_ex__ = enum.pickle_by_enum_name (Python 3.11 and later), or keep x.name",
    )


def _unequal_to_its_copy(value: Any) -> bool:
    kind = type(value)
    if kind is float:
        return bool(value != value)
    if kind is tuple:
        return any(_unequal_to_its_copy(part) for part in value)
    if kind is functools.partial:
        return True
    by_name = kind is not object and "__reduce_ex__" in vars(kind)
    return not issubclass(kind, type) and not by_name and _compares_by_identity(kind)


def _compares_by_identity(kind: type) -> bool:
    found: Any = kind.__eq__
    same_object = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type(None), enum.Enum, torch.dtype)
    return found is object.__eq__ and not issubclass(kind, same_object)


def _delegates_forever(value: Any, whole: Saved) -> tuple[str, str] | None:
    """Loading makes a blank object and asks it for `__setstate__` before any attribute is there."""
    kind: Any = type(value)
    if not own_hook(kind, "__getattr__") or own_hook(kind, "__new__") or has(kind, "__setstate__", nn.Module):
        return None
    if whole.func not in NEW or issubclass(kind, (nn.Module, BaseException)):
        return None
    try:
        blank = kind.__new__(kind)
        answer = getattr(blank, "__setstate__", _NO_STATE)
    except RecursionError:
        said = "recursion in __getattr__ while restoring: it reads an attribute that is not there yet"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: B036
        said = f"__getattr__ raises {type(error).__name__} ({error}) instead of AttributeError while restoring"
    else:
        if answer is _NO_STATE or callable(answer):
            return None
        said = f"__getattr__ answers {type(answer).__name__} for '__setstate__', which loading then calls"
    return f"{kind.__name__} pickles but does not load (nor deepcopy): {said}", _GUARD


def refuses_to_be_saved(value: Any) -> tuple[str, str] | None:
    """(reason, fix) if pickle asks `__getattr__` for `__getstate__`, as in Python 3.10, and is given a wrong answer."""
    kind: Any = type(value)
    if (
        hasattr(kind, "__getstate__")
        or not own_hook(kind, "__getattr__")
        or own_hook(kind, "__reduce_ex__", "__reduce__")
    ):
        return None  # from Python 3.11 on every object has one
    try:
        answer = getattr(value, "__getstate__", _NO_STATE)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: B036
        return f"saving it fails: its __getattr__ raises {type(error).__name__} ({error}) for '__getstate__'", _GUARD
    if answer is _NO_STATE or callable(answer):
        return None
    return f"saving it fails: its __getattr__ answers {type(answer).__name__} for '__getstate__'", _GUARD


def refuses_to_copy(value: Any) -> tuple[str, str] | None:
    """(reason, fix) if `copy.deepcopy` fails or copies something else because `__getattr__` answers for it."""
    kind: Any = type(value)
    if not own_hook(kind, "__getattr__") or has(kind, "__deepcopy__"):
        return None
    of_dict = issubclass(kind, dict)  # where asking may make an entry
    if of_dict and own_hook(kind, "__new__"):
        return None
    try:
        answer = getattr(kind.__new__(kind) if of_dict else value, "__deepcopy__", None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: B036
        said = f"fails: its __getattr__ raises {type(error).__name__} ({error}) for '__deepcopy__'"
    else:
        owner = getattr(answer, "__self__", value)
        if answer is None or callable(answer) and (of_dict or owner is value):
            return None
        said = "fails: its __getattr__ answers for '__deepcopy__'"
        if callable(answer):
            said = f"copies the {type(owner).__name__} inside alone: its __getattr__ answers for '__deepcopy__'"
    return f"copy.deepcopy {said}; torch.save and pickle work", _GUARD


def _strange_state(value: Any, whole: Saved) -> tuple[str, str] | None:
    if has(type(value), "__setstate__") or whole.setter is not None or own_hook(type(value), "__getattr__"):
        return None
    state = whole.state
    halves = state if type(state) is tuple and len(state) == 2 else (state,)
    if all(half is None or issubclass(type(half), dict) for half in halves):
        return None
    return (
        f"its __getstate__ returns {type(state).__name__}, which can't be loaded: there is no __setstate__ to take it",
        "write __setstate__, or return a dict of attributes",
    )


def unsettled(value: Any, whole: Saved) -> str | None:
    """What of the user's own code runs when `value` is loaded, if anything does: only running it can tell."""
    kind = type(value)
    hook = own_hook(kind, "__setstate__", "__new__", "__getattribute__", "__getnewargs__", "__getnewargs_ex__")
    if hook:
        return hook
    if type(whole.state) is tuple and not has(kind, "__setstate__") and own_hook(kind, "__setattr__"):
        return "__setattr__"  # what is in slots is set by it
    if issubclass(type(whole.func), type) and whole.func not in NEW:
        own = own_hook(whole.func, "__init__", "__new__") or own_hook(kind, "__reduce__", "__reduce_ex__")
        return f"{whole.func.__name__}(…)" if own and not issubclass(kind, enum.Enum) else None
    if whole.func not in NEW and not trusted(getattr(whole.func, "__module__", None)):
        return f"{getattr(whole.func, '__name__', whole.func)}(…)"
    if own_hook(kind, "__getattr__") and not issubclass(kind, nn.Module):
        return "__getattr__"
    if (whole.items is not None or whole.pairs is not None) and own_hook(kind, "append", "extend", "__setitem__"):
        return "__setitem__"
    return None


def holds_itself_as_key(container: dict[Any, Any] | set[Any], limit: int = 1000) -> bool:
    """Whether a member that is hashed by code of its own leads back to the container (or too far to tell).

    Pickle may then put it into the container, and hash it, before its attributes are there.
    """
    queue = [key for key in container if type(key) not in ATOMS and own_hook(type(key), "__hash__")]
    seen: dict[int, Any] = {}
    while queue:
        held = queue.pop()
        if held is container or len(seen) > limit:
            return True
        if id(held) in seen or type(held) in ATOMS or issubclass(type(held), torch.Tensor):
            continue
        seen[id(held)] = held
        if type(held) in CONTAINERS:
            queue += [part for _, part in contents(held)]
        else:
            queue += own_attributes(held).values()
    return False
