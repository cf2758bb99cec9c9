"""Functions and classes: pickle saves them by name, and another process must find the same thing under it."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import types
from typing import Any

from nanscan.pickling.light import PROTOCOL
from nanscan.pickling.verdict import MAINS, judge

__all__ = ["forget", "on_path", "refused_name"]

_NAME_IT = "write it as a named function at the top of a module (functools.partial binds its arguments)"
_MOVE_IT = "move it into a module file that can be imported"
_UNWRAP_IT = (
    "put the decorator over the def itself, so that both have one name; or, where the wrapped function was put on an "
    "instance (model.forward = …), take it off before saving (del model.forward) and put it on again after loading"
)


def refused_name(value: Any, for_process: bool = False) -> tuple[str, str, str] | None:
    """(reason, fix, severity) if a function or class can't be found by its name; None if it can.

    >>> refused_name(len), refused_name(dict)
    (None, None)
    >>> refused_name(lambda x: x)[0]
    'a lambda defined at <doctest nanscan.pickling.byname.refused_name[1]>:1 has no name to be imported by'
    """
    try:
        pickle.dumps(value, PROTOCOL)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: B036
        return (*_why(value, error), "error")
    return _elsewhere(value, for_process)


def forget() -> None:
    """Look at sys.path anew: a module may have been added or removed since."""
    _importable.cache_clear()


def _why(value: Any, error: BaseException) -> tuple[str, str]:
    qualname = str(getattr(value, "__qualname__", value))
    outer, _, name = qualname.rpartition(".<locals>.")
    where = (f" in {outer.replace('.<locals>', '')}()" if outer else "") + _source(value)
    if isinstance(value, type):
        return _class_reason(value, where, outer, error)
    if name.endswith("<lambda>") or qualname == "<lambda>":
        return f"a lambda defined{where} has no name to be imported by", _NAME_IT
    if outer:
        kind = "closure" if getattr(value, "__closure__", None) else "local function"
        return f"'{name}' is a {kind} defined{where}: nothing outside can import it", _NAME_IT
    return (
        f"'{_full(value)}' is not found by that name, or is another object ({_said(error)})",
        _UNWRAP_IT
        if _unwrapped(value) is not value
        else "keep it under its own name at the top of its module (functools.wraps on a decorator that replaces it)",
    )


def _class_reason(value: type, where: str, outer: str, error: BaseException) -> tuple[str, str]:
    if outer:
        return f"'{value.__name__}' is a local class defined{where}: nothing outside can import it", (
            "define the class at the top of a module"
        )
    if hasattr(value, "_fields"):
        return (
            f"the namedtuple '{value.__name__}' is not found as '{_full(value)}'",
            "bind it at the top of a module to the name it was made with",
        )
    if "__members__" in vars(value) and "__entries" in vars(value):  # pybind11's
        return f"the enumeration '{_full(value)}' is not found by that name", (
            "keep the member's name (x.name), and look it up again by it"
        )
    return (
        f"the class '{_full(value)}' is not found by that name, or is another object: it was replaced, reloaded or "
        f"made at run time ({_said(error)})",
        "keep the class at the top of its module under its own name; make the instance again after a reload",
    )


def _elsewhere(value: Any, for_process: bool) -> tuple[str, str, str] | None:
    """Found in this process: would another one find it?"""
    module = getattr(value, "__module__", None)
    if module in MAINS:
        return _in_main(value, for_process)
    if not isinstance(module, str) or _importable(module):
        return None
    what = f"is in the module '{module}', which another process can't import (no file of it is on sys.path)"
    return f"'{getattr(value, '__qualname__', value)}' {what}", _MOVE_IT, "error"


def _in_main(value: Any, for_process: bool) -> tuple[str, str, str] | None:
    """A script finds its own classes again; a process that it starts only those at its top level."""
    entry = {"module": "__main__", "name": value.__qualname__, "error": "AttributeError", "message": "__main__"}
    file = getattr(sys.modules["__main__"], "__file__", None)
    main_file = file if isinstance(file, str) and os.path.exists(file) else None
    return next(iter(judge({"missing": [entry]}, for_process, main_file, 0.0)), None)


@functools.lru_cache(maxsize=4096)
def _importable(module: str) -> bool:
    """Whether a new process with the same sys.path can import `module`."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return True
    loaded = sys.modules.get(module)
    origin = getattr(loaded, "__file__", None)
    if origin is None and getattr(loaded, "__path__", None) is None:
        return _compiled_in(module, loaded)
    return (origin is None or os.path.exists(origin)) and on_path(top)


def _compiled_in(module: str, loaded: Any) -> bool:
    """A module that an extension makes while it is imported (such as torch._C's) has no file of its own."""
    parent = module.rpartition(".")[0]
    known = getattr(loaded, "__spec__", None) is not None
    return known or (bool(parent) and parent in sys.modules and _importable(parent))


def on_path(top: str) -> bool:
    """Whether the import system would find the top-level module or package `top` anew (editable installs included)."""
    for finder in sys.meta_path:
        try:
            if getattr(finder, "find_spec", None) and finder.find_spec(top, None) is not None:
                return True
        except Exception:
            continue
    return False


def _source(value: Any) -> str:
    code = getattr(_unwrapped(value), "__code__", None)
    if isinstance(code, types.CodeType):
        return f" at {code.co_filename}:{code.co_firstlineno}"
    for method in vars(value).values() if isinstance(value, type) else ():  # a class does not know its line
        if _is_written_there(method, value):
            return f" in {method.__code__.co_filename} (first method at line {method.__code__.co_firstlineno})"
    file = getattr(sys.modules.get(getattr(value, "__module__", "") or ""), "__file__", None)
    return f" in {file}" if file else ""


def _unwrapped(function: Any) -> Any:
    """The function that decorators (torch.no_grad, torch.compile) wrapped: the one that somebody wrote."""
    for _ in range(100):
        inner = vars(function).get("__wrapped__") if isinstance(function, types.FunctionType) else None
        if inner is None:
            break
        function = inner
    return function


def _is_written_there(method: Any, owner: type) -> bool:
    """Whether it is a method from the class's own text; dataclasses and enums add some of theirs."""
    if not isinstance(method, types.FunctionType) or method.__code__.co_filename == "<string>":
        return False
    return bool(method.__globals__.get("__name__") == owner.__module__)


def _full(value: Any) -> str:
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', value)}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
