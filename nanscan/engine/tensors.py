"""From what a caller hands over to the plain strided tensors that hold the elements; tied tensors once."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanscan.engine.result import BadInput
from nanscan.engine.shards import is_dtensor, local_of, logical_index

_FLOAT8 = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)
_PLAIN = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_READABLE = _PLAIN | _FLOAT8 | {torch.complex64, torch.complex128, torch.complex32}
_PLAIN_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class _Unreadable(Exception):
    """`BadInput` before the position is known."""

    def __init__(self, reason: str, kind: type[Exception]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind


@dataclass
class Entry:
    """One unique tensor: its first position, its others, the object given, and the memory with its elements."""

    position: int
    source: Tensor
    values: Tensor
    also: list[int] = field(default_factory=list)


def is_float8(dtype: torch.dtype) -> bool:
    """True for the dtypes that PyTorch can convert but not compute with."""
    return dtype in _FLOAT8


def is_plain_float(dtype: torch.dtype) -> bool:
    """True for the real dtypes that PyTorch's ``_foreach_*`` operators take."""
    return dtype in _PLAIN


def flat_params(param_groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    """Every parameter of an optimizer's groups, in order: the positions that `scan_grads` counts in."""
    return [p for group in param_groups for p in group["params"]]


def unique(tensors: Sequence[Any], start: int = 0) -> list[Entry]:
    """The readable tensors among ``tensors`` (None is skipped), each once, in order of first position.

    The same tensor means: the same object, or the same memory, shape, strides and dtype.
    Raises `BadInput` with the position (counted from ``start``) for anything else than a tensor that holds numbers.
    """
    by_key: dict[Hashable, Entry] = {}
    for position, tensor in enumerate(tensors, start):
        if tensor is None:
            continue
        seen = by_key.get(id(tensor))
        if seen is None:
            values = resolve_at(position, tensor)
            seen = by_key.setdefault(_memory_key(tensor, values), Entry(position, tensor, values))
            by_key[id(tensor)] = seen
        if seen.position != position:
            seen.also.append(position)
    return list({id(entry): entry for entry in by_key.values()}.values())


def resolve(tensor: Any) -> Tensor:
    """The plain strided tensor that holds the elements of ``tensor``; shares its memory wherever that is possible.

    Sparse COO gives its coalesced values, other sparse layouts and nested tensors their values, a DTensor its local
    shard, any other subclass the tensor that it wraps. A conjugated or negated view gives the memory that it views
    (no magnitude and no position changes). Raises `BadInput` (position 0) where there are no such elements.
    """
    return resolve_at(0, tensor)


def may_overlap(t: Tensor) -> bool:
    """True if two elements of the strided tensor ``t`` may share memory, as in ``torch.ones(1).expand(4)``."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride <= reach:
            return t.numel() > 0
        reach += stride * (size - 1)
    return False


def full_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape that indices of ``tensor`` refer to: its own, a DTensor's whole one; of a nested tensor its values'."""
    if is_dtensor(tensor):
        return tuple(tensor.shape)
    own = type(tensor) in _PLAIN_TYPES and not tensor.is_nested
    return tuple(tensor.shape if own else resolve(tensor).shape)


def full_index(tensor: Tensor, first_bad: int) -> tuple[int, ...]:
    """The index in `full_shape` of a row's ``first_bad``; of a sparse tensor it starts with the row id.

    Of a DTensor it is the index in the whole tensor, not in the shard that is here.

    >>> values = [[1.0, 0.0], [2.0, 0.0], [float("inf"), 0.0]]
    >>> t = torch.sparse_coo_tensor([[3, 1, 3]], values, (5, 2), check_invariants=True)
    >>> full_index(t, 2)  # the values of row 3, summed, come second
    (3, 0)
    """
    if is_dtensor(tensor):
        return logical_index(tensor, first_bad)
    values = resolve(tensor)
    at = tuple(int(i) for i in np.unravel_index(first_bad, tuple(values.shape)))
    if tensor.layout is torch.sparse_coo:
        return (*tensor.detach().coalesce().indices()[:, at[0]].tolist(), *at[1:])
    return _compressed_index(tensor, at) if tensor.layout in _COMPRESSED else at


def _compressed_index(tensor: Tensor, at: tuple[int, ...]) -> tuple[int, ...]:
    """The index (*batch, row, column, *dense) of element ``at`` of the values of a CSR, CSC, BSR or BSC tensor."""
    batch = tensor.dim() - tensor.dense_dim() - 2
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    ends = tensor.crow_indices() if by_row else tensor.ccol_indices()
    plain = tensor.col_indices() if by_row else tensor.row_indices()
    lead, k = at[:batch], at[batch]
    major = int(torch.searchsorted(ends[lead].contiguous(), k, right=True)) - 1
    minor = int(plain[lead][k])
    row, column = (major, minor) if by_row else (minor, major)
    rest = at[batch + 1 :]
    if tensor.layout in (torch.sparse_bsr, torch.sparse_bsc):
        height, width = tensor.values().shape[batch + 1 : batch + 3]
        return (*lead, row * height + rest[0], column * width + rest[1], *rest[2:])
    return (*lead, row, column, *rest)


def holds_its_values(tensor: Tensor) -> bool:
    """False for a layout whose elements `resolve` has to copy out (MKL-DNN), so that writing there changes nothing."""
    return tensor.layout in (torch.strided, torch.jagged, torch.sparse_coo, *_COMPRESSED)


def resolve_at(position: int, tensor: Any) -> Tensor:
    try:
        return _strided(_plain(_checked(tensor)))
    except _Unreadable as error:
        raise BadInput(position, error.reason, error.kind) from None


def _memory_key(source: Tensor, values: Tensor) -> Hashable:
    """Equal for two tensors that are the same one; never made from memory that only this scan keeps alive."""
    if values.numel() == 0 or source.layout is not torch.strided:
        return id(source)
    return (values.device, values.data_ptr(), values.shape, values.stride(), values.dtype)


def _checked(tensor: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise _Unreadable(_not_a_tensor(tensor), TypeError)
    if torch.nn.parameter.is_lazy(tensor):
        raise _Unreadable("is not initialized yet: run one forward pass first", ValueError)
    if is_transformed(tensor):
        raise _Unreadable(
            "is a tensor inside of torch.func.grad, vmap or another transform, where it has no numbers of its own: "
            "scan what goes into the transform, or what comes out of it",
            ValueError,
        )
    if tensor.is_meta or _is_fake(tensor):
        raise _Unreadable("is a meta or fake tensor: it has a shape but no numbers to scan", ValueError)
    if tensor.is_quantized:
        raise _Unreadable(f"is quantized ({tensor.dtype}): scan its .dequantize()", TypeError)
    return tensor


def _not_a_tensor(thing: Any) -> str:
    kind = type(thing)
    if kind.__module__ == "numpy":
        return f"is a numpy.{kind.__name__}, not a tensor: use torch.from_numpy (or torch.as_tensor)"
    if isinstance(thing, (bool, int, float, complex)):
        return f"is the number {thing!r} ({kind.__name__}), not a tensor: use torch.tensor"
    if kind.__module__.partition(".")[0] == "paddle":
        return f"is of Paddle ({kind.__name__}): use nanscan.integrations.paddle for it"
    nested = ": give the tensors in it in one flat list or dict" if issubclass(kind, (dict, list, tuple)) else ""
    return f"is a {kind.__module__}.{kind.__qualname__}, not a tensor{nested}".replace("builtins.", "")


def is_transformed(tensor: Tensor) -> bool:
    """True for what a function given to torch.func.grad, vmap and the like computes with.

    >>> seen = []
    >>> _ = torch.func.vmap(lambda x: seen.append(is_transformed(x)) or x)(torch.ones(2))
    >>> seen
    [True]
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _is_fake(tensor: Tensor) -> bool:
    if type(tensor) in _PLAIN_TYPES:
        return torch._is_functional_tensor(tensor)
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and bool(fake.is_fake(tensor))


def _plain(tensor: Tensor) -> Tensor:
    """``tensor`` without a subclass around it."""
    if type(tensor) in _PLAIN_TYPES:
        return tensor
    if is_dtensor(tensor):
        return _plain(_checked(local_of(tensor)))
    if hasattr(tensor, "to_local"):
        return _plain(_checked(_waited(tensor.to_local())))
    if tensor.is_nested:
        return _plain(tensor.values())
    if hasattr(tensor, "__tensor_flatten__"):
        return _plain(_checked(_only_part(_waited(tensor))))
    if tensor.layout is torch.strided:
        _check_storage(tensor)  # a wrapper has none, and would be asked to give what it wraps
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _waited(tensor: Any) -> Any:
    """The result of a collective that is still under way (AsyncCollectiveTensor), when it is there."""
    return tensor.wait() if type(tensor).__name__ == "AsyncCollectiveTensor" else tensor


def parts_of(tensor: Any) -> dict[str, Tensor] | None:
    """The tensors inside of a wrapper that has no elements of its own (quantized state); None for any other tensor."""
    if type(tensor) in _PLAIN_TYPES or is_dtensor(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return None
    if tensor.is_nested or hasattr(tensor, "to_local") or hasattr(tensor, "wait"):
        return None
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def _only_part(tensor: Any) -> Tensor:
    """The one inner floating tensor of a wrapper subclass that has all its elements."""
    if type(tensor) is Tensor:
        return tensor
    names, _ = tensor.__tensor_flatten__()
    parts = [part for part in (getattr(tensor, name) for name in names) if isinstance(part, Tensor)]
    same = [part for part in parts if part.shape == tensor.shape and part.dtype == tensor.dtype]
    if len(parts) != 1 or len(same) != 1:
        raise _Unreadable(f"is a {type(tensor).__name__}: scan the tensors inside it, {', '.join(names)}", TypeError)
    return same[0]


def _strided(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _READABLE:
        raise _Unreadable(_bad_dtype(tensor.dtype), TypeError)
    if tensor.layout is torch.sparse_coo:
        return _strided(tensor.detach().coalesce().values())
    if tensor.layout in _COMPRESSED:
        return _strided(tensor.detach().values())
    if tensor.layout is not torch.strided:
        return _strided(tensor.to_dense())
    if tensor.is_nested:
        return _strided(tensor.values())
    if tensor.is_complex() and tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    _check_storage(tensor)
    return tensor


def _bad_dtype(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return f"has dtype {dtype}, which PyTorch cannot convert: scan a copy in a wider dtype"
    return f"has dtype {dtype}: only floating-point and complex tensors can hold NaN or Inf"


def _check_storage(tensor: Tensor) -> None:
    if tensor.numel() == 0:
        return
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + reach + 1) * tensor.itemsize
    held = _held_bytes(tensor)
    if held < needed:
        raise _Unreadable(f"has no memory: its storage holds {held} of {needed} bytes (freed or resized)", ValueError)


def _held_bytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    except (RuntimeError, NotImplementedError):  # a subclass that owns no storage
        return 0
