"""Whose code it is: pickling hooks of Python, PyTorch, NumPy and this library are taken to do what they say."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

__all__ = ["own_hook", "trusted"]

_KNOWN = frozenset({"torch", "paddle", "numpy", "nanscan", "builtins"})


def trusted(module: Any) -> bool:
    """Whether a module's name is one of Python's, PyTorch's, NumPy's or ours.

    >>> trusted("threading"), trusted("torch.nn"), trusted("my_project")
    (True, True, False)
    """
    if not isinstance(module, str):
        return True  # a slot of a builtin type
    top = module.partition(".")[0]
    return top in _KNOWN or top.startswith("namedtuple_") or (top in sys.stdlib_module_names and top != "__main__")


def own_hook(kind: type, *names: str) -> str | None:
    """The first of the special methods `names` that a class has from code that isn't trusted, else None.

    >>> class Cache:
    ...     def __getstate__(self): return {}
    >>> Cache.__getstate__.__module__ = "my_project"
    >>> own_hook(Cache, "__reduce__", "__getstate__")
    '__getstate__'
    """
    for name in names:
        owner = next((c for c in kind.__mro__ if name in vars(c)), None)
        if owner is None or owner is object or (name == "__new__" and issubclass(owner, enum.Enum)):
            continue
        method = vars(owner)[name]
        function = getattr(method, "__func__", method)
        module = getattr(function, "__module__", None) or getattr(owner, "__module__", None)
        if isinstance(function, types.FunctionType) and module in (None, "builtins"):
            return name  # code that was run without a module of its own; builtins has no Python functions
        if method is not None and not trusted(module):
            return name
    return None
