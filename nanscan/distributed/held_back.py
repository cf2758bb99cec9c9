"""Gradients that `fully_shard` holds back until an accumulation's last backward: nobody can look at them before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from nanscan import messages
from nanscan.engine.shards import is_dtensor

__all__ = ["note_held_back"]

_MATTER = "set_requires_gradient_sync(False) holds the gradients back until the last backward of the window"
_REMEDY = "call model.set_requires_gradient_sync(True) before every micro-batch, and each is looked at"


def note_held_back(guard: Any, drop: bool, after_backward: bool) -> None:
    """Say once that micro-batches can't be looked at, and refuse to drop them.

    Args:
        guard: the guarded optimizer.
        drop: as in `check_microbatch`.
        after_backward: whether there should be gradients by now.

    Raises:
        NotImplementedError: `drop`: the gradients of a dropped micro-batch would be in the sum nevertheless.
    """
    if not guard._sharded or not _held_back(guard.model, guard._flat_params(), after_backward):
        return
    if drop:
        raise NotImplementedError(f"check_microbatch(drop=True): {_MATTER}, where nothing can be dropped: {_REMEDY}")
    if "_held_back_said" not in vars(guard):
        guard._held_back_said = True
        messages.warn(
            f"nanscan: {_MATTER}: check_microbatch sees the loss alone, and what is bad in the gradients is blamed on "
            f"the micro-batch that reduces them: {_REMEDY}. (This is said once.)"
        )


def _held_back(model: nn.Module | None, params: Sequence[Any], after_backward: bool) -> bool:
    """Whether `set_requires_gradient_sync(False)` is on, or has left gradients that are no parameter's `.grad` yet.

    Args:
        model: as in `nanscan.wrap`; None: judged by the shards, all of which then lack a gradient.
        params: the optimizer's.
        after_backward: whether there should be gradients by now.
    """
    if model is not None:
        return any(_holds_back(module) for module in model.modules() if hasattr(module, "_get_fsdp_state"))
    shards = [param for param in params if is_dtensor(param) and param.requires_grad]
    return after_backward and bool(shards) and all(param.grad is None for param in shards)


def _holds_back(module: Any) -> bool:
    state = module._get_fsdp_state()  # torch has no public way to ask; where it changes, nothing is said
    one = getattr(state, "_fsdp_param_group", None)
    groups = getattr(state, "_fsdp_param_groups", [one] if one is not None else [])
    return any(not getattr(group, "reduce_grads", True) for group in groups)
