"""`nanscan.find_origin`: run a piece of a program once more, traced, and leave everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from nanscan.origin.keep import Keeper
from nanscan.origin.record import Origin
from nanscan.origin.trace import Trace
from nanscan.reruns import rerun

__all__ = ["find_origin"]


def find_origin(step_fn: Callable[[], Any], model: nn.Module | None = None) -> Origin | None:
    """Run `step_fn()` under a trace and say where the first NaN or Inf was made; nothing of the run remains.

    Parameters, buffers, optimizer state, `.grad`, the global random generators, autocast and gradient mode are
    afterwards as they were, also where `step_fn` calls `optimizer.zero_grad()`, `backward()` and `optimizer.step()`. A
    guarded optimizer (`nanscan.wrap`) neither counts nor warns in it. What else `step_fn` changes (an iterator that it
    advances, a file) is its own affair: give it the batch that failed.

    Args:
        step_fn: a function without arguments: one training step, or a part of it.
        model: gives module paths and parameter names, see `nanscan.trace`.

    Returns:
        The `Origin`, or None if everything was finite.

    Raises:
        TypeError: if `step_fn` can't be called.
        Exception: whatever `step_fn` raises, unless an origin was found before: then that is returned, and its note
            says what was raised.

    >>> import torch, nanscan
    >>> model = torch.nn.Linear(2, 1)
    >>> origin = nanscan.find_origin(lambda: (model(torch.ones(3, 2)) * 0).sqrt().sum().backward(), model)
    >>> origin.op, origin.kind, model.weight.grad is None
    ('SqrtBackward0', 'inf', True)
    """
    if not callable(step_fn):
        raise TypeError(f"step_fn must be a function without arguments, got {type(step_fn).__name__}")
    keeper = Keeper(None if model is None else [model])
    trace = Trace(model, keeper=keeper)
    try:
        with rerun(), trace:
            step_fn()
    except Exception as error:
        if trace.origin is None:
            raise
        return _with_note(trace.origin, f"then {type(error).__name__} was raised: {error}")
    finally:
        keeper.restore()
    return trace.origin


def _with_note(origin: Origin, note: str) -> Origin:
    return replace(origin, note=note if origin.note is None else f"{origin.note}; {note}")
