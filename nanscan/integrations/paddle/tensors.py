"""What a Paddle tensor is made of: the dense tensor with its elements, its label, where a flat index lies in it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from paddle.nn.clip import merge_selected_rows

from nanscan.engine.result import BadInput, EngineScan
from nanscan.report import Label

__all__ = ["Entry", "dtype_name", "label_of", "resolve_at", "sparse_places", "merged_rows", "unique"]

_READABLE = frozenset(
    {"float32", "float16", "bfloat16", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"}
)
_KINDS = {"Place(cpu)": "cpu", "Place(gpu_pinned)": "cpu"}


@dataclass
class Entry:
    """One unique tensor: its first position, its others, the object given, and the dense tensor with its elements."""

    position: int
    source: Any
    values: Any
    also: list[int] = field(default_factory=list)


def dtype_name(dtype: Any) -> str:
    """`"float32"` for `paddle.float32`."""
    return str(dtype).removeprefix("paddle.")


def device_name(tensor: Any) -> str:
    """`"cpu"` or `"gpu:0"`: where a tensor lies."""
    place = str(tensor.place)
    return _KINDS.get(place, place.removeprefix("Place(").removesuffix(")"))


def label_of(tensor: Any, names: tuple[str, ...], kind: str = "tensor") -> Label:
    """The label of a Paddle tensor; the shape of one with sparse rows is the dense one."""
    return Label(names, _shape(tensor), dtype_name(tensor.dtype), device_name(tensor), kind)


def _shape(tensor: Any) -> tuple[int, ...]:
    shape = tuple(int(n) for n in tensor.shape)
    if tensor.is_selected_rows():
        return (int(tensor.get_selected_rows().height()), *shape[1:])
    return tuple(resolve_at(0, tensor).shape) if tensor.is_sparse_csr() else shape


def resolve_at(position: int, tensor: Any) -> Any:
    """The dense tensor that holds the elements of ``tensor``, in its memory wherever that is possible.

    Sparse rows (the gradient of `paddle.nn.Embedding(sparse=True)`) give the values of the merged rows, sparse COO its
    coalesced values, CSR its values, a distributed tensor its local part.

    Raises:
        BadInput: it has no elements that can be NaN or Inf.
    """
    if not isinstance(tensor, paddle.Tensor):
        raise BadInput(position, _not_a_tensor(tensor), TypeError)
    if tensor.is_dist():
        tensor = tensor._local_value()
    name = dtype_name(tensor.dtype)
    if name not in _READABLE:
        reason = f"has dtype {name}: only floating-point and complex tensors can hold NaN or Inf"
        raise BadInput(position, reason, TypeError)
    if not tensor._is_initialized() and (not tensor.is_dense() or tensor.size):
        raise BadInput(position, "has no memory: it is not initialized, or was cleared", ValueError)
    if tensor.is_selected_rows():
        return merged_rows(tensor)._get_tensor_from_selected_rows()
    if tensor.is_sparse_coo():
        return tensor.coalesce().values()
    if tensor.is_sparse_csr():
        return tensor.values()
    return tensor if type(tensor) in _EXACT else tensor.detach()


def merged_rows(tensor: Any) -> Any:
    """Sparse rows with the values of equal rows summed."""
    merge: Any = merge_selected_rows
    return merge(tensor)


def _not_a_tensor(thing: Any) -> str:
    kind = type(thing)
    if kind.__module__ == "numpy":
        return f"is a numpy.{kind.__name__}, not a tensor: use paddle.to_tensor"
    if isinstance(thing, (bool, int, float, complex)):
        return f"is the number {thing!r} ({kind.__name__}), not a tensor: use paddle.to_tensor"
    return f"is a {kind.__module__}.{kind.__qualname__}, not a paddle.Tensor".replace("builtins.", "")


_EXACT = (paddle.Tensor, paddle.base.framework.EagerParamBase)


def unique(tensors: Sequence[Any], start: int = 0) -> list[Entry]:
    """The readable tensors among ``tensors`` (None is skipped), each once, in order of first position.

    The same tensor means: the same object, or the same memory, shape, strides and dtype.
    """
    by_key: dict[Hashable, Entry] = {}
    for position, tensor in enumerate(tensors, start):
        if tensor is None:
            continue
        values = resolve_at(position, tensor)
        entry = by_key.setdefault(_memory_key(tensor, values), Entry(position, tensor, values))
        if entry.position != position:
            entry.also.append(position)
    return list(by_key.values())


def _memory_key(source: Any, values: Any) -> Hashable:
    """Equal for two tensors that are the same one; never made from memory that only this scan keeps alive."""
    if not values.size or not source.is_dense():
        return id(source)
    return (str(values.place), values.data_ptr(), tuple(values.shape), tuple(values.strides), values.dtype)


def sparse_places(scan: EngineScan, tensors: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """Position -> index of the first bad element in the dense shape, for those bad ones that are sparse.

    Args:
        scan: of `tensors`.
        tensors: as they were scanned, by position.
    """
    places: dict[int, tuple[int, ...]] = {}
    if scan.finite:
        return places
    for row in scan.bad_rows():
        index = _sparse_index(tensors[row.position], row.first_bad)
        if index is not None:
            places[row.position] = index
    return places


def _sparse_index(tensor: Any, first_bad: int) -> tuple[int, ...] | None:
    if tensor.is_selected_rows():
        merged = merged_rows(tensor)
        at = np.unravel_index(first_bad, tuple(merged.shape))
        return (int(merged.rows()[int(at[0])]), *(int(i) for i in at[1:]))
    if tensor.is_sparse_coo():
        whole = tensor.coalesce()
        at = np.unravel_index(first_bad, tuple(whole.values().shape))
        return (*(int(i) for i in whole.indices()[:, int(at[0])].numpy()), *(int(i) for i in at[1:]))
    return None
