"""Objects of PaddlePaddle, known without importing it: whoever holds one has imported it already."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from nanscan.engine.result import BadInput
from nanscan.report import Label

__all__ = [
    "as_torch",
    "as_torch_at",
    "device_name",
    "dtype_name",
    "holds_floats",
    "imported",
    "is_layer",
    "is_optimizer",
    "is_tensor",
    "label_of",
    "named_values",
    "of_state_dict",
    "shape_of",
]

_FLOATS = frozenset(
    {"float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"}
)


def imported() -> bool:
    """Whether there can be any."""
    return "paddle" in sys.modules


def is_tensor(value: Any) -> bool:
    """True for a `paddle.Tensor`, a parameter too.

    >>> is_tensor(torch.ones(2))
    False
    """
    return _is(value, "Tensor")


def is_layer(value: Any) -> bool:
    """True for a `paddle.nn.Layer`."""
    return _is(value, "nn", "Layer")


def is_optimizer(value: Any) -> bool:
    """True for a `paddle.optimizer.Optimizer`."""
    return _is(value, "optimizer", "Optimizer")


def _is(value: Any, *path: str) -> bool:
    found: Any = sys.modules.get("paddle")
    for name in path:
        found = getattr(found, name, None)  # while paddle is being imported it does not have all of its names yet
    return isinstance(found, type) and issubclass(type(value), found)


def dtype_name(tensor: Any) -> str:
    """`"float32"` for `paddle.float32`."""
    return str(tensor.dtype).rpartition(".")[2]


def device_name(tensor: Any) -> str:
    """`"cpu"` or `"gpu:0"`, as `paddle.device.set_device` takes it."""
    return str(tensor.place).removeprefix("Place(").removesuffix(")")


def holds_floats(tensor: Any) -> bool:
    """Whether an element can be NaN or Inf."""
    return dtype_name(tensor) in _FLOATS


def label_of(tensor: Any, names: tuple[str, ...], kind: str) -> Label:
    """The label of a tensor in a report."""
    return Label(names, shape_of(tensor), dtype_name(tensor), device_name(tensor), kind)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape; of the sparse gradient of an embedding that of the table."""
    if tensor.is_selected_rows():
        return (int(tensor.get_selected_rows().height()), *map(int, tensor.shape[1:]))
    return tuple(map(int, tensor.shape))


def named_values(layer: Any) -> Iterator[tuple[str, str, Any]]:
    """(kind, name, tensor) of a layer's parameters and buffers, tied ones under every name that they have."""
    for prefix, inner in _layers(layer):
        for kind, held in (("parameter", inner._parameters), ("buffer", inner._buffers)):
            for name, value in held.items():
                if value is not None and value._is_initialized():
                    yield kind, f"{prefix}.{name}" if prefix else name, value


def of_state_dict(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors of a layer's or an optimizer's `state_dict()`, master weights too; without counters and schedules."""
    whole = isinstance(state, OrderedDict) or "LR_Scheduler" in state or "master_weights" in state
    for name, value in state.items():
        if whole and name == "master_weights" and isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", tensor) for inner, tensor in value.items())
        elif not whole or (is_tensor(value) and holds_floats(value)):
            yield str(name), value


def _layers(layer: Any) -> Iterator[tuple[str, Any]]:
    """A layer and those within it, in order; one that is held twice comes twice, as `named_sublayers` would not."""
    pending = [("", layer, frozenset({id(layer)}))]
    while pending:
        prefix, inner, around = pending.pop()
        yield prefix, inner
        children = [(name, child) for name, child in inner._sub_layers.items() if child is not None]
        for name, child in reversed(children):
            if id(child) not in around:
                pending.append((f"{prefix}.{name}" if prefix else name, child, around | {id(child)}))


def as_torch(tensor: Any) -> Tensor:
    """The elements as a tensor of PyTorch: the same memory, read through DLPack, without the graph.

    Sparse tensors become sparse ones; a device that PyTorch was not built for costs a copy to the host.

    Raises:
        ValueError: there is no memory (yet).
    """
    if not tensor._is_initialized():
        raise ValueError("has no memory: it is not initialized yet (a lazy parameter, or one that was released)")
    if tensor.is_selected_rows():
        return _rows(tensor)
    if tensor.is_sparse():
        return _sparse(tensor)
    plain = tensor.detach()
    if not plain.place.is_cpu_place() and not (plain.place.is_gpu_place() and torch.cuda.is_available()):
        plain = plain.cpu()
    return from_dlpack(plain)


def as_torch_at(position: int, tensor: Any) -> Tensor:
    """`as_torch` with an engine's error, which knows the position."""
    try:
        return as_torch(tensor)
    except ValueError as error:
        raise BadInput(position, str(error), ValueError) from None


def _rows(tensor: Any) -> Tensor:
    rows = torch.tensor(tensor.rows(), dtype=torch.int64, device="cpu")
    values = from_dlpack(tensor.get_selected_rows().get_tensor()._to_dlpack()) if rows.numel() else None
    if values is None:
        values = torch.zeros(0, *map(int, tensor.shape[1:]), device="cpu")
    return torch.sparse_coo_tensor(rows[None].to(values.device), values, shape_of(tensor), check_invariants=True)


def _sparse(tensor: Any) -> Tensor:
    values = as_torch(tensor.values())
    if tensor.is_sparse_coo():
        return torch.sparse_coo_tensor(as_torch(tensor.indices()), values, shape_of(tensor), check_invariants=True)
    ends, columns = as_torch(tensor.crows()), as_torch(tensor.cols())
    if len(shape_of(tensor)) != 2:  # one matrix after the other, as PyTorch has them only if all are of one size
        return values
    return torch.sparse_csr_tensor(ends, columns, values, shape_of(tensor), check_invariants=True)
