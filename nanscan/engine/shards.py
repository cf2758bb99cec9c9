"""DTensors: the shard that this process holds, and where it stands in the whole tensor. No collective is made here."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["box_of", "dtensor_type", "is_dtensor", "local_of", "logical_index"]


def dtensor_type() -> type | tuple[()]:
    """`DTensor`, or what nothing is an instance of while nobody has imported it; importing it takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", ())


def is_dtensor(tensor: Any) -> bool:
    """True for a `torch.distributed.tensor.DTensor`."""
    return isinstance(tensor, dtensor_type())


def local_of(tensor: Any) -> Tensor:
    """The memory of a DTensor's local shard, without a copy and outside of autograd; waits for one on its way."""
    local: Tensor = tensor._local_tensor
    return local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local  # type: ignore[attr-defined]


def box_of(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offsets) of this rank's shard in the whole tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offsets)


def logical_index(tensor: Any, first_bad: int) -> tuple[int, ...]:
    """The index in the whole tensor of element `first_bad` (row-major) of this rank's shard."""
    local = np.unravel_index(first_bad, tuple(local_of(tensor).shape))
    _, offsets = box_of(tensor)
    return tuple(int(at) + start for at, start in zip(local, offsets, strict=True))
