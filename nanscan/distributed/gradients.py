"""The gradients of sharded parameters as the plain tensors that this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanscan.engine.shards import dtensor_type, local_of

__all__ = ["local_grads", "local_groups"]


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


class _Local:
    """Stands for a DTensor parameter where its gradient's shard is changed in place, or replaced."""

    __slots__ = ("_grad", "_whole")

    def __init__(self, whole: Any, grad: Tensor | None) -> None:
        self._whole = whole
        self._grad = grad

    @property
    def grad(self) -> Tensor | None:
        return self._grad

    @grad.setter
    def grad(self, value: Tensor) -> None:
        self._grad = self._whole.grad._local_tensor = value


def local_groups(params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """What the engine's functions take as parameter groups, with the local shard as the gradient of each DTensor."""
    kind: Any = dtensor_type()
    grads = local_grads(params)
    return [{"params": [_Local(p, g) if isinstance(p, kind) else p for p, g in zip(params, grads, strict=True)]}]


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
