"""The parts of PyTorch without a public name that a trace needs, in one place.

| here | what it is |
|---|---|
| `sequence_nr` | the number that the next autograd node of this thread gets |
| `enter`, `leave`, `is_current`, `is_on_stack`, `any_mode` | the stack of dispatch modes |
| `no_modes` | a context in which no dispatch mode sees anything |
| `WeakStorage` | a weak reference to a storage, with `.expired()` |
| `plain` | what is inside the wrappers of `torch.func` |
| `replace_backward` | the one function that every backward pass goes through |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.utils import _python_dispatch

__all__ = [
    "WeakStorage",
    "any_mode",
    "enter",
    "is_current",
    "is_on_stack",
    "leave",
    "no_modes",
    "plain",
    "replace_backward",
    "sequence_nr",
]

_dispatch: Any = _python_dispatch
_autograd: Any = torch.autograd
_functorch: Any = torch._C._functorch

WeakStorage: Any = reductions.StorageWeakRef
no_modes: Any = _dispatch._disable_current_modes
sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr


def enter(mode: Any) -> None:
    """Put a dispatch mode on the stack."""
    mode.__enter__()


def leave(mode: Any) -> None:
    """Take a dispatch mode off the stack; it must be on top."""
    mode.__exit__(None, None, None)


def is_current(mode: Any) -> bool:
    """True if it is the mode on top of the stack."""
    return _dispatch._get_current_dispatch_mode() is mode


def is_on_stack(mode: Any) -> bool:
    """True if it is anywhere on the stack."""
    return any(other is mode for other in _dispatch._get_current_dispatch_mode_stack())


def any_mode() -> bool:
    """True if there is any dispatch mode on the stack."""
    return bool(_dispatch._get_current_dispatch_mode_stack())


def plain(tensor: Any) -> Any:
    """The tensor inside the wrappers that `torch.func` puts around it."""
    while isinstance(tensor, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def replace_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have `torch.autograd.backward` and `grad` call `function`; returns what they called before."""
    before: Callable[..., Any] = _autograd._engine_run_backward
    _autograd._engine_run_backward = function
    return before
