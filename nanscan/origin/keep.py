"""Puts a program back to where it was after a piece of it was run for a trace.

Memory is copied just before the first op that overwrites it; nothing is copied up front.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanscan.distributed.refusals import refuse_sharded
from nanscan.origin.modules import storage_key
from nanscan.rng import rng_state, set_rng_state

__all__ = ["Keeper"]

_INSTEAD = "their memory comes and goes during a step; nanscan.trace() around the failing forward and backward works"


class Keeper:
    """Parameters, buffers, optimizer state, `.grad`, generators, autocast and gradient mode as they are now.

    Sharded tensors can't be kept: they are refused in the models, at the moment when they are written to, and, where no
    models are given, wherever there are any in the program.
    """

    def __init__(
        self, models: Sequence[nn.Module] | None = None, what: str = "find_origin", instead: str = _INSTEAD
    ) -> None:
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: set[int] = set()
        self._refuse = partial(refuse_sharded, what=what, instead=instead)
        for model in models or ():
            self._refuse([*model.parameters(), *model.buffers()])
        leaves, optimizers, guards = _found_in_memory(self._refuse if models is None else None)
        self._grads = [(leaf, leaf.grad) for leaf in leaves]
        self._states = [(o, {key: _shallow(value) for key, value in o.state.items()}) for o in optimizers]
        self._groups = [(o, [dict(group) for group in o.param_groups]) for o in optimizers]
        self._guards = [(guard, vars(guard).get("step"), list(guard._losses)) for guard in guards]
        self._rng = rng_state()
        self._switches = _switches()
        for guard, _, _ in self._guards:
            vars(guard)["step"] = _plain_step(guard)
        if any(getattr(leaf, "_post_accumulate_grad_hooks", None) for leaf in leaves):
            with torch.no_grad():  # hooks that step in backward, where the trace does not look at ops
                self.save(leaves)

    def save(self, tensors: Sequence[Tensor]) -> None:
        """Keep what these hold, unless their memory was kept before. To be called before it is overwritten."""
        self._refuse(tensors)
        for tensor in tensors:
            key = storage_key(tensor)
            if key is not None and key not in self._saved and tensor.layout is torch.strided:
                whole = _whole(tensor)
                self._saved[key] = (whole, whole.clone())

    def save_grad(self, leaf: Tensor) -> None:
        """Keep the gradient of a leaf that backward is about to add to."""
        if leaf.grad is not None:
            with torch.no_grad():
                self.save([leaf.grad])

    def restore(self) -> None:
        """Put everything back."""
        for guard, step, losses in self._guards:
            vars(guard).pop("step", None)
            if step is not None:
                vars(guard)["step"] = step
            guard._losses[:] = losses
        with torch.no_grad():
            for whole, copy in self._saved.values():
                whole.copy_(copy)
        for leaf, grad in self._grads:
            if leaf.grad is not grad:
                leaf.grad = grad
        for optimizer, state in self._states:
            optimizer.state.clear()
            optimizer.state.update(state)
        for optimizer, groups in self._groups:
            for group, kept in zip(optimizer.param_groups, groups, strict=False):
                group.clear()
                group.update(kept)
        set_rng_state(self._rng)
        for put_back in self._switches:
            put_back()
        self._saved.clear()


def _whole(tensor: Tensor) -> Tensor:
    """All the memory that a tensor is a view of, as a flat tensor of its dtype."""
    with torch.no_grad():
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(storage, 0, (storage.nbytes(),), (1,))
        return flat


def _found_in_memory(
    refuse: Callable[[list[Any]], None] | None,
) -> tuple[list[Tensor], list[torch.optim.Optimizer], list[Any]]:
    """Every leaf that can have a gradient, every optimizer and every guard of the program.

    What a step function changes can't be read off it; types are asked instead of `isinstance`, which some objects
    answer by running code.
    """
    from nanscan.guard import GuardedOptimizer

    leaves: list[Tensor] = []
    optimizers: list[torch.optim.Optimizer] = []
    guards: list[Any] = []
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, Tensor):
            if refuse is not None and kind not in (Tensor, nn.Parameter):
                refuse([thing])
            if kind in (Tensor, nn.Parameter) and thing.requires_grad and _is_leaf(thing):
                leaves.append(thing)
        elif issubclass(kind, GuardedOptimizer):
            if "optimizer" in vars(thing):
                guards.append(thing)
        elif issubclass(kind, torch.optim.Optimizer) and "param_groups" in vars(thing):
            optimizers.append(thing)
    return leaves, optimizers, guards


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # one of several views, whose base was changed since: nobody can use it any more
        return False


def _plain_step(guard: Any) -> Any:
    """A guard does not count, clip or warn while its step is traced: the inner optimizer steps, to be put back."""

    def step(closure: Any = None, **kwargs: Any) -> Any:
        return guard.optimizer.step(closure, **kwargs) if closure is not None else guard.optimizer.step(**kwargs)

    return step


def _shallow(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _switches() -> list[Any]:
    """Functions that put autocast, gradient mode and the default dtype back."""
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    cache = torch.is_autocast_cache_enabled()
    found = [
        lambda: torch.set_grad_enabled(grad),
        lambda: torch.set_default_dtype(dtype),
        lambda: torch.set_autocast_cache_enabled(cache),
    ]
    for device in ("cpu", "cuda"):
        enabled, kind = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        found.append(lambda d=device, e=enabled: torch.set_autocast_enabled(d, e))  # type: ignore[misc]
        found.append(lambda d=device, k=kind: torch.set_autocast_dtype(d, k))  # type: ignore[misc]
    return found
