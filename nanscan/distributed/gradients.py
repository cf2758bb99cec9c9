"""The gradients of sharded parameters as the plain tensors that this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanscan.engine.shards import dtensor_type, local_of

__all__ = ["local_grads"]


def local_grads(params: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of each parameter; of a DTensor its local shard, without a copy.

    A gradient that is placed otherwise than its parameter (a partial sum, as sequence parallelism leaves it on a
    replicated weight) is brought there first: all ranks of its mesh do that together, as the optimizer would.
    """
    kind: Any = dtensor_type()
    grads: list[Tensor | None] = []
    for param in params:
        grad: Any = param.grad
        if isinstance(grad, kind):
            if isinstance(param, kind) and grad.placements != param.placements:
                grad = _moved(param, grad)
            grad = local_of(grad)
        grads.append(grad)
    return grads


@torch.no_grad()
def _moved(param: Any, grad: Any) -> Any:
    try:
        param.grad = grad.redistribute(placements=param.placements)
    except RuntimeError as error:
        raise RuntimeError(
            f"nanscan: a gradient placed as {grad.placements} could not be brought to {param.placements}, where its "
            f"parameter is: {error}. All ranks of its mesh must take part, with a gradient each"
        ) from error
    return param.grad
