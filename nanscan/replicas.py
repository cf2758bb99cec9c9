"""Gradients of DistributedDataParallel that a backward has not averaged over the ranks, because it was given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["average_gradients", "has_replicas"]

_NONE, _DENSE, _OTHER = 0, 1, 2


def has_replicas(model: nn.Module | None) -> bool:
    """True if DistributedDataParallel averages gradients of this model over ranks."""
    return model is not None and any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())


@torch.no_grad()
def average_gradients(params: Sequence[Tensor], group: Any) -> bool:
    """Make each gradient the mean over the ranks, as a backward outside of `no_sync()` makes it.

    A rank without a gradient counts as zeros where another one has it.

    Args:
        params: whose; the same on every rank, on a device that the group's collectives serve.
        group: of the ranks; all of them call this.

    Returns:
        False, and nothing is changed on any rank, if a rank has a gradient that is sparse.
    """
    kinds = torch.tensor([_kind(p) for p in params], dtype=torch.uint8, device=params[0].device)
    dist.all_reduce(kinds, dist.ReduceOp.MAX, group=group)
    shared = kinds.tolist()
    if _OTHER in shared:
        return False
    ranks = dist.get_world_size(group)
    for param, kind in zip(params, shared, strict=True):
        if kind == _DENSE:
            mean = (torch.zeros_like(param) if param.grad is None else param.grad) / ranks
            dist.all_reduce(mean, group=group)
            param.grad = mean if param.grad is None else param.grad.copy_(mean)
    return True


def _kind(param: Tensor) -> int:
    if param.grad is None:
        return _NONE
    return _DENSE if param.grad.layout is torch.strided else _OTHER
