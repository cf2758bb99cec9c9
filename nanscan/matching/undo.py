"""A model as it was before a load, for models whose own code takes part in it, and memory for meta tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

__all__ = ["Before", "materialise", "on_meta", "runs_own_code"]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer, UninitializedParameter, UninitializedBuffer)


def runs_own_code(model: nn.Module, values: Iterable[Any]) -> bool:
    """True if more than plain copies happens when `model` loads: then only trying shows whether it can.

    That is so where a module has hooks for loading, a method of its own, or extra state, and where a tensor is of a
    kind (sharded, sparse, quantized) that may refuse a copy.
    """
    if any(isinstance(value, Tensor) and _is_special(value) for value in values):
        return True
    return any(_has_own_code(module) for module in model.modules())


def _is_special(value: Tensor) -> bool:
    return type(value) not in _PLAIN or value.layout is not torch.strided or value.is_quantized


def _has_own_code(module: nn.Module) -> bool:
    kind = type(module)
    hooks: list[Any] = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    methods = (kind._load_from_state_dict, kind.load_state_dict, kind.set_extra_state)
    return not all(map(_is_torchs, methods)) or not all(_is_lazys(hook) for hook in hooks)


def _is_torchs(method: Any) -> bool:
    return (getattr(method, "__module__", None) or "").startswith("torch.")


def _is_lazys(hook: Any) -> bool:
    return getattr(getattr(hook, "hook", hook), "__name__", "") in ("_lazy_load_hook", "_infer_parameters")


class Before:
    """What to put back if a load fails.

    Args:
        model: what is loaded into.
        own: the part of its state to copy, name -> live tensor or extra state. Takes as much memory as these.
    """

    def __init__(self, model: nn.Module, own: Mapping[str, Any]) -> None:
        self.undo: list[Callable[[], Any]] = []
        for module in model.modules() if own else ():
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                self.undo.append(_extra_state_of(module))
        tensors = {id(value): value for value in own.values() if isinstance(value, Tensor)}
        for value in tensors.values():
            if not is_lazy(value) and not value.is_meta:
                self.undo.append(_values_of(value))

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for step in reversed(self.undo):
            step()


def _extra_state_of(module: nn.Module) -> Callable[[], Any]:
    saved = copy.deepcopy(module.get_extra_state())
    return lambda: module.set_extra_state(saved)


def _values_of(tensor: Tensor) -> Callable[[], Any]:
    saved = tensor.detach().clone()
    return lambda: tensor.copy_(saved)


def materialise(model: nn.Module, own: Mapping[str, Any], values: Mapping[str, Any], before: Before) -> None:
    """Give the model's meta tensors that are about to be loaded memory on the device of their values; ties stay."""
    made: dict[int, Tensor] = {}
    for name, value in values.items():
        tensor = own[name]
        if isinstance(tensor, Tensor) and tensor.is_meta and not is_lazy(tensor) and not value.is_meta:
            made.setdefault(id(tensor), _like(tensor, value.device))
    for module in model.modules() if made else ():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for members in both:
            for key, member in members.items():
                if member is not None and id(member) in made:
                    before.undo.append(_member(members, key, member))
                    members[key] = made[id(member)]


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    new = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new


def _member(members: dict[str, Any], key: str, tensor: Tensor) -> Callable[[], Any]:
    return lambda: members.__setitem__(key, tensor)


def on_meta(model: nn.Module, loaded: Iterable[str]) -> list[str]:
    """Names of the model's tensors that stay without values: on the meta device and not among those `loaded`."""
    given = set(loaded)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    held = {id(tensor) for name, tensor in named if name in given}
    return [name for name, tensor in named if tensor.is_meta and id(tensor) not in held]
