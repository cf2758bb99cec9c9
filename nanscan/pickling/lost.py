"""What pickles and loads, and is silently gone afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from nanscan.inner_attributes import own_attributes as dropped_by_torch
from nanscan.pickling.parts import NEW, Saved, own_attributes
from nanscan.pickling.trust import own_hook

__all__ = ["lost_function", "lost_with", "subclass_loss", "tensor_loss"]

_KEEP = (
    "return a state too: (cls, args, self.__dict__ without what can't be saved), or name what to drop with "
    "nanscan.TransientState, which keeps everything else"
)
_COMPUTED = {
    "weight_norm": "use torch.nn.utils.parametrizations.weight_norm, which can be copied",
    "spectral_norm": "use torch.nn.utils.parametrizations.spectral_norm, which can be copied",
    "prune": "torch.nn.utils.prune.remove(module, '{name}') where the pruning is final",
}


def lost_with(value: Any, whole: Saved, holder: Any = None) -> tuple[str, str] | None:
    """(reason, fix) if an object's own reducer leaves its attributes or its weights out.

    Args:
        value: the object.
        whole: what its reducer answers.
        holder: the object that it is a part of, if any: a guard saves attributes of the optimizer in it.
    """
    kind = type(value)
    if issubclass(kind, nn.Module):
        return _lost_weights(value, kind, whole)
    if issubclass(kind, torch.optim.Optimizer):
        return _lost_hooks(value, whole) or _lost_options(value, whole, holder)
    if whole.state or whole.items is not None or whole.pairs is not None:
        return None
    attributes = [name for name in own_attributes(value) if not name.startswith("__")]
    if not attributes:
        return None
    if whole.func in NEW or whole.args:  # made blank; or from arguments, which may be all there is to it
        hook = own_hook(kind, "__getstate__")
        return _gone(f"its __getstate__ returns {whole.state!r}", attributes) if hook and len(whole.args) <= 1 else None
    hook = own_hook(kind, "__reduce_ex__", "__reduce__")
    if hook and issubclass(type(whole.func), type):
        return _gone(f"its {hook} returns ({whole.func.__name__}, ()) and no state", attributes)
    return None


def _gone(what: str, attributes: list[str]) -> tuple[str, str]:
    shown = ", ".join(attributes[:4]) + (f" and {len(attributes) - 4} more" if len(attributes) > 4 else "")
    return f"{what}: it loads without its attributes ({shown})", _KEEP


def _lost_hooks(optimizer: Any, whole: Saved) -> tuple[str, str] | None:
    kept = whole.state if issubclass(type(whole.state), dict) else {}
    hooks = {
        name: len(held)
        for name, held in own_attributes(optimizer).items()
        if name.endswith("_hooks") and name not in kept and issubclass(type(held), dict) and held
    }
    if not hooks:
        return None
    return (
        f"{sum(hooks.values())} hook(s) of this optimizer, registered in {', '.join(hooks)}, would not be saved",
        "register them again after loading",
    )


def _lost_options(optimizer: Any, whole: Saved, holder: Any) -> tuple[str, str] | None:
    kept = set(whole.state) if issubclass(type(whole.state), dict) else set()
    if hasattr(type(holder), "carried_attributes") and own_attributes(holder).get("optimizer") is optimizer:
        kept |= holder.carried_attributes().keys()
    names = [name for name in dropped_by_torch(optimizer) if name not in kept]
    if not names:
        return None
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (
        f"torch.optim.Optimizer pickles defaults, state and param_groups only: {shown} would not be saved, and a copy "
        "may fail at its first step",
        "save optimizer.state_dict() and load it into a new optimizer, or pickle the guarded one "
        "(nanscan.wrap(optimizer)), which takes along what can be pickled",
    )


def _lost_weights(module: nn.Module, kind: type, whole: Saved) -> tuple[str, str] | None:
    hook = own_hook(kind, "__reduce_ex__", "__reduce__", "__getstate__")
    if hook is None:
        return None
    held = _held(module)
    if not held or any(_has_tensor(part) for part in whole):
        return None
    return (
        f"its {hook} carries no weights: {held} parameters and buffers are new (random) ones after loading",
        _KEEP,
    )


def _held(module: nn.Module) -> int:
    """How many parameters and buffers there are, however deep."""
    return sum(len(m._parameters) + len(m._buffers) for m in module.modules() if "_parameters" in m.__dict__)


def _has_tensor(value: Any, depth: int = 5) -> bool:
    kind = type(value)
    if issubclass(kind, (torch.Tensor, np.ndarray, torch.UntypedStorage, torch.TypedStorage)):
        return True
    if depth == 0:
        return False
    if issubclass(kind, nn.Module):
        return _held(value) > 0 or any(_has_tensor(v, depth - 1) for v in vars(value).values())
    if issubclass(kind, dict):
        return any(_has_tensor(v, depth - 1) for v in dict.values(value))
    if kind in (list, tuple):
        return any(_has_tensor(v, depth - 1) for v in value)
    return kind is bytes and len(value) > 64  # the object's own serialization


def tensor_loss(value: torch.Tensor, holder: Any = None, for_process: bool = False) -> Iterator[tuple[str, str]]:
    """(reason, fix) of what a tensor, an attribute of `holder`, does not take along."""
    if value.requires_grad and not value.is_leaf:
        node = value.grad_fn
        yield (
            f"a tensor of shape {tuple(value.shape)} that is part of a graph (grad_fn {node and node.name()}): "
            "copy.deepcopy fails on it ('Only Tensors created explicitly by the user'); torch.save and pickle work and "
            "drop the graph",
            _computed_anew(value, holder) or "store value.detach() instead, or register_buffer it",
        )
    elif not for_process and _sparse_and_uncopyable(value):
        yield (
            f"copy.deepcopy fails on a {type(value).__name__} of layout {value.layout}; torch.save and pickle work",
            (
                "make the copy with load_state_dict (a new model of the same class, then "
                "copy.load_state_dict(model.state_dict())); or keep it as a buffer of layout torch.sparse_coo, which "
                "can be copied"
            ),
        )
    elif value.is_nested and value.layout is torch.strided and not for_process:
        yield (
            "copy.deepcopy fails on a nested tensor of this layout; torch.save and pickle work",
            ("make it with layout=torch.jagged, which can be copied, or keep the list of tensors (value.unbind())"),
        )
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(value, name, None)
        if hooks:
            yield (
                f"{len(hooks)} hook(s) of this tensor, registered in {name}, would not be saved",
                "register them again after loading",
            )


def _sparse_and_uncopyable(value: torch.Tensor) -> bool:
    if value.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return True
    return value.layout is torch.sparse_coo and issubclass(type(value), nn.Parameter)


def subclass_loss(kind: type[torch.Tensor], for_process: bool) -> tuple[str, str] | None:
    """(reason, fix) of what all instances of a subclass of tensors lose."""
    if issubclass(kind, nn.Parameter):
        return _as_parameter(kind)
    return None if for_process else _fails_to_copy(kind)


def _as_parameter(kind: type[nn.Parameter]) -> tuple[str, str] | None:
    if kind.__reduce_ex__ is not nn.Parameter.__reduce_ex__:
        return None
    return (
        f"it loads as a torch.nn.Parameter, not as {kind.__name__}: PyTorch saves the data of a parameter without its "
        "class (copy.deepcopy keeps it)",
        "save the model's state_dict() and load it into a model that the program makes anew, or give the class a "
        "__reduce_ex__ of its own",
    )


def _fails_to_copy(kind: type[torch.Tensor]) -> tuple[str, str] | None:
    """`copy.deepcopy` gives up on a subclass unless the class sees to it."""
    special: Any = torch.Tensor
    if kind.__deepcopy__ is not special.__deepcopy__:
        return None
    if kind.__torch_dispatch__ is not special.__torch_dispatch__:
        return None  # such a class makes its instances itself
    try:
        copy.deepcopy(torch.empty(1, device="cpu").as_subclass(kind))
    except RuntimeError as error:
        if "default implementation of __deepcopy__" not in str(error):
            return None
    except Exception:
        return None  # its own code misses what an instance has
    else:
        return None
    return (
        "copy.deepcopy (as for an average of weights) fails: it gets no instance of the subclass from new_empty(); "
        "torch.save and pickle work",
        "give the class a __deepcopy__(self, memo), such as return self.detach().clone().as_subclass(type(self)), or "
        "keep value.as_subclass(torch.Tensor)",
    )


def _computed_anew(value: torch.Tensor, holder: Any) -> str | None:
    """What to do with a weight that a hook of torch.nn.utils (weight_norm, prune) computes before each forward pass."""
    hooks = holder._forward_pre_hooks.values() if issubclass(type(holder), nn.Module) else ()
    for hook in hooks:
        name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
        kind = type(hook).__module__.removeprefix("torch.nn.utils.")
        if kind in _COMPUTED and type(name) is str and vars(holder).get(name) is value:
            final = _COMPUTED[kind].format(name=name)
            return (
                f"it is computed anew before each forward pass ({type(hook).__name__}): {final}; or, before copying, "
                f"module.{name} = module.{name}.detach()"
            )
    return None


def lost_function(value: Mapping[Any, Any]) -> Iterator[tuple[str, int]]:
    """Where in a scheduler's state dict a function was replaced by None: (key, position)."""
    functions = value.get("lr_lambdas")
    if type(functions) is list and "last_epoch" in value:
        yield from (("lr_lambdas", i) for i, f in enumerate(functions) if f is None)
