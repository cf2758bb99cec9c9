"""Watched calls: PyTorch calls a module with a hook the long way, so the engine stands in for the call itself.

A module's `compile()` leaves its compiled call in an attribute that PyTorch asks for before anything else. Watched
calls are there for the time of one forward: a module that is copied later must not take along the original's call.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

__all__ = ["WatchedCalls", "can_be_watched"]

_CALL = "_compiled_call_impl"


class WatchedCalls:
    """The engine's calls that stand in for those of modules, each with the hook that does the same."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Any], Any]] = []  # the attributes of a module and its call
        self._hooked: list[tuple[str, nn.Module, Any]] = []  # name, module and hook, in the same order

    def add(self, name: str, module: nn.Module, call: Any, hook: Any) -> None:
        """Take in a module's."""
        self._places.append((module.__dict__, call))
        self._hooked.append((name, module, hook))

    def put_in(self) -> list[Any]:
        """Begin to watch; where there is another call meanwhile, by a hook, whose handle is returned."""
        handles = []
        for (attributes, call), (_, module, hook) in zip(self._places, self._hooked, strict=True):
            if attributes.setdefault(_CALL, call) is not call:
                handles.append(module.register_forward_hook(hook))
        return handles

    def take_out(self) -> None:
        """Leave no trace."""
        for attributes, call in self._places:
            if attributes.get(_CALL) is call:
                del attributes[_CALL]

    def hang_hooks(self, names: set[str]) -> Iterator[Any]:
        """Hang the hooks of some modules instead; gives their handles."""
        return (module.register_forward_hook(hook) for name, module, hook in self._hooked if name in names)


def can_be_watched(module: nn.Module) -> bool:
    """Whether a watched call sees what a hook would: of a module that isn't compiled or called in a way of its own.

    One that has hooks already is called the long way in any case, and the order of hooks matters.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    own_way = type(module).__call__ is not nn.Module.__call__
    return not own_way and getattr(module, _CALL) is None and not any(hooks) and _calls_can_be_watched()


@cache
def _calls_can_be_watched() -> bool:
    """Whether PyTorch asks for such a call. Not beside accelerators: `DataParallel` gives it to a module's replicas."""
    probe = nn.Identity()
    setattr(probe, _CALL, bool)
    return probe(0) is False and not torch.accelerator.is_available()
