"""What pickling does to Paddle's tensors and layers, told from what they say of themselves; no data is copied."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from nanscan import paddle_objects
from nanscan.pickling.naming import Step, item_step

__all__ = ["OF_TORCH", "REGISTRIES", "layer_loss", "registered", "tensor_error", "tensor_loss"]

REGISTRIES = ("_sub_layers", "_parameters", "_buffers")
_LISTS = frozenset({"Sequential", "LayerList", "ParameterList"})
_DICTS = frozenset({"LayerDict", "ParameterDict"})
OF_TORCH = (
    "torch.load(weights_only=True) refuses paddle.Tensor",
    "save the state in a file of Paddle's: nanscan.save(state, 'state.pdparams'), or paddle.save",
)


def tensor_error(tensor: Any) -> tuple[str, str] | None:
    """(reason, fix) of a tensor that can't be pickled; trying would end the process for a sparse one."""
    if tensor.is_selected_rows() or tensor.is_sparse():
        return "pickling a sparse tensor of Paddle ends the process (a segmentation fault)", (
            "keep x.to_dense(), or its indices() and values()"
        )
    name = paddle_objects.dtype_name(tensor)
    if name.startswith("float8"):
        return (
            f"a {name} tensor pickles and does not load: NumPy does not know the dtype",
            "keep x.astype('bfloat16'), which is exact",
        )
    return None


def tensor_loss(tensor: Any) -> tuple[str, str] | None:
    """(reason, fix) of what a tensor does not take along."""
    if tensor.stop_gradient or tensor.is_leaf:
        return None
    return (
        f"a tensor of shape {paddle_objects.shape_of(tensor)} that is part of a graph: pickle and paddle.save drop the "
        "graph",
        "keep x.detach() instead",
    )


def layer_loss(layer: Any) -> tuple[str, str]:
    """(reason, fix) of a whole layer, which is never a good thing to save."""
    count = sum(1 for kind, _, _ in paddle_objects.named_values(layer) if kind == "parameter")
    size = sum(math.prod(t.shape) for kind, _, t in paddle_objects.named_values(layer) if kind == "parameter")
    names = (
        f"; pickle does, but its {count} parameters ({size:,} elements) come back as plain tensors under new names, "
        "without their learning rate, regularizer and need_clip: an optimizer's state does not fit them any more"
        if count
        else ""
    )
    return (
        f"paddle.save refuses a Layer{names}",
        "save layer.state_dict() (nanscan.save(layer.state_dict(), 'model.pdparams') or paddle.save) and give it to "
        "set_state_dict() of a layer that the program makes anew",
    )


def registered(layer: Any, key: Any, held: dict[str, Any]) -> Iterable[tuple[tuple[Step, ...], Any]]:
    """Children, parameters and buffers, as one reaches them."""
    kinds = {base.__name__ for base in type(layer).__mro__ if base.__module__.startswith("paddle.nn.")}
    for position, (name, child) in enumerate(held.items()):
        if child is None:
            continue
        if kinds & _LISTS and str(name).isdigit():
            yield (("item", int(name)),), child
        elif kinds & _DICTS:
            yield (("item", name),), child
        elif str(name).isidentifier():
            yield (("attr", name),), child
        else:
            yield (("attr", key), item_step(name, position)), child
