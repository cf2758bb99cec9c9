"""What the inputs and outputs of the op at fault looked like. Only runs once something was found."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanscan import engine
from nanscan.engine.result import BadInput
from nanscan.engine.shards import is_dtensor, local_of
from nanscan.engine.tensors import full_index, full_shape
from nanscan.names import dtype_name
from nanscan.origin.record import TensorRange
from nanscan.origin.torch_private import plain

__all__ = [
    "Counts",
    "bad_counts",
    "element_at",
    "first_bad_of",
    "first_of_kind",
    "has_plus_inf",
    "range_of",
    "shape_of",
]

Counts = tuple[int, int]
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def bad_counts(tensor: Tensor) -> Counts:
    """How many NaN and how many Inf a tensor holds; (0, 0) for one that can't hold any or can't be read."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0, 0
    try:
        scan = engine.scan([plain(tensor)])
    except BadInput:
        return 0, 0
    return scan.nan_count, scan.inf_count


def has_plus_inf(tensor: Tensor) -> bool:
    """True if an element is +Inf; complex ones, and those that can't be compared, have no sign and count as such."""
    try:
        return bool((tensor.detach() == torch.inf).any()) or tensor.is_complex()
    except (RuntimeError, NotImplementedError):
        return True


def first_bad_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Index of the first NaN or Inf, None if there is none."""
    tensor = plain(tensor)
    try:
        rows = engine.scan([tensor]).bad_rows()
    except BadInput:
        return None
    return full_index(tensor, rows[0].first_bad) if rows else None


def first_of_kind(tensor: Tensor, kind: str) -> tuple[int, ...] | None:
    """Index of the first NaN where `kind` is `"nan"` and it can be told apart, else of the first bad element."""
    first = first_bad_of(tensor)
    if kind != "nan" or first is None or tensor.layout is not torch.strided or is_dtensor(tensor) or tensor.is_nested:
        return first
    if tensor.dtype.itemsize > 1 and bool(tensor[first].isinf()):
        places = tensor.isnan().nonzero()
        return tuple(places[0].tolist()) if len(places) else first
    return first


def element_at(tensor: Tensor, shape: Sequence[int], index: Sequence[int]) -> float | str | None:
    """The element that broadcasting to `shape` puts at `index`; None if the tensor does not broadcast to it."""
    if tensor.is_nested:
        return None
    own = tuple(tensor.shape)
    if is_dtensor(tensor) or tensor.layout is not torch.strided or len(own) > len(shape) or tensor.numel() == 0:
        return None
    if any(n not in (1, full) for n, full in zip(reversed(own), reversed(tuple(shape)), strict=False)):
        return None
    place = tuple(0 if n == 1 else i for n, i in zip(own, tuple(index)[len(index) - len(own) :], strict=True))
    value = tensor[place].item()
    return str(value) if isinstance(value, complex) else float(value)


def range_of(name: str, tensor: Tensor, shape: Sequence[int] = (), index: Sequence[int] | None = None) -> TensorRange:
    """The range of a tensor; with `index` also the element at that place of `shape`."""
    tensor = plain(tensor)
    nan, inf = bad_counts(tensor)
    low, high = _finite_range(tensor)
    return TensorRange(
        name=name,
        shape=shape_of(tensor),
        dtype=dtype_name(tensor.dtype),
        device=str(tensor.device),
        min=low,
        max=high,
        nan_count=nan,
        inf_count=inf,
        first_bad=first_bad_of(tensor) if nan or inf else None,
        value_at=None if index is None else element_at(tensor, shape, index),
    )


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor, sharded ones as a whole; sizes that differ within a nested one are given as -1."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return (tensor.size(0), *(-1,) * (tensor.dim() - 1))
    try:
        return full_shape(tensor)
    except BadInput:
        return tuple(tensor.shape)


def _finite_range(tensor: Tensor) -> tuple[float | None, float | None]:
    if tensor.is_complex() or tensor.numel() == 0 or tensor.is_meta or tensor.is_nested:
        return None, None
    values = local_of(tensor) if is_dtensor(tensor) else tensor.detach()  # of a DTensor what is here
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    if values.layout is not torch.strided or tensor.is_quantized:
        return None, None
    if tensor.dtype not in _INTEGERS:
        values = values[values.isfinite()] if values.dtype.itemsize > 1 else values.float()
        values = values[values.isfinite()]
    if values.numel() == 0:
        return None, None
    return float(values.min()), float(values.max())
