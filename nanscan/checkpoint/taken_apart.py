"""How a plain tensor is taken apart for pickling: as torch does it, without what it asks about other kinds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["taken_apart"]

_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8}
    | {torch.int8, torch.int16, torch.int32, torch.int64}
)
_strided = torch.strided
_has_names: Callable[[Tensor], bool] | None = getattr(Tensor, "has_names", None)  # torch refuses to save named ones
_rebuild = torch._utils._rebuild_tensor_v2
_typed: Any = torch.TypedStorage
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def taken_apart(tensor: Tensor, storage: Any) -> Reduced | None:
    """What ``tensor.__reduce_ex__(2)`` returns, in a third of the time; None where torch itself is to be asked.

    Args:
        tensor: of the type `torch.Tensor`, of no subclass.
        storage: its ``untyped_storage()``.

    >>> import torch
    >>> weight = torch.zeros(2, 3)
    >>> taken_apart(weight, weight.untyped_storage())[1][1:5] == weight.__reduce_ex__(2)[1][1:5]
    True
    """
    if tensor.dtype not in _DTYPES or tensor.layout is not _strided or not tensor.is_cpu:
        return None
    if tensor.__dict__ or tensor._backward_hooks or tensor.is_nested or tensor.is_neg() or not _is_torchs_way():
        return None
    if _has_names is not None and _has_names(tensor):
        return None
    return _parts(tensor, storage)


def _parts(tensor: Tensor, storage: Any) -> Reduced:
    typed = _typed(wrap_storage=storage, dtype=tensor.dtype, _internal=True)
    size, stride = tuple(tensor.size()), tensor.stride()
    return _rebuild, (typed, tensor.storage_offset(), size, stride, tensor.requires_grad, OrderedDict())


@cache
def _is_torchs_way() -> bool:
    """False for a version of torch that takes tensors apart in another way."""
    probe: Any = torch.zeros(2, 3, device="cpu")
    try:
        ours, theirs = _parts(probe, probe.untyped_storage()), probe.__reduce_ex__(2)
    except (AttributeError, TypeError):
        return False
    kinds = [type(part) for part in ours[1]] == [type(part) for part in theirs[1]]
    return kinds and ours[0] is theirs[0] and ours[1][1:] == theirs[1][1:]
