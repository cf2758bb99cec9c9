"""From nodes of a pickle to entries: what PyTorch's and NumPy's functions would make of their arguments, unmade."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from nanscan.errors import CorruptCheckpoint
from nanscan.files.arrays import Found, array_entries, ml_dtype
from nanscan.files.elements import Element, of_torch
from nanscan.files.entry import Entry
from nanscan.files.layout import View, row_major
from nanscan.files.nodes import Blob, Dict, Global, Object, Persistent
from nanscan.files.source import Latin1Text, Memory, Part, Source
from nanscan.files.sparse import sparse_entry

__all__ = ["KNOWN", "Rebuild", "Storage", "Storages", "storage_element"]

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64", "LongStorage": "int64",
    "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "UntypedStorage": "uint8", "QInt8Storage": "qint8", "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
_LAYERS = 16  # a parameter of a subclass of a wrapped tensor …


class Storage(NamedTuple):
    """The memory that tensors are views of."""

    key: Any
    source: Source
    element: Element
    big_endian: bool = False


class Storages(Protocol):
    """Where a file keeps its storages."""

    def storage(self, reference: Persistent) -> Storage: ...
    def packed(self, source: Source) -> Storage: ...


def storage_element(kind: Any) -> Element:
    """The element of a storage class such as ``torch.FloatStorage``."""
    name = kind.name if isinstance(kind, Global) else ""
    if name not in _STORAGES:
        raise CorruptCheckpoint(f"a storage has no known type ({str(getattr(kind, 'full', kind))[:80]})")
    return of_torch(DTYPES[_STORAGES[name]])


class Rebuild:
    """Finds the tensors in nodes.

    Args:
        storages: where the file keeps their memory.
    """

    def __init__(self, storages: Storages) -> None:
        self.storages = storages
        self._packed: dict[int, Storage] = {}

    def find(self, node: Any) -> list[Found] | None:
        """The entries that ``node`` itself is; None if it is no tensor (its children may be).

        Raises:
            CorruptCheckpoint: it should be a tensor, but its arguments make none.
        """
        if isinstance(node, Persistent):
            return self._bare_storage(node)
        for _ in range(_LAYERS):
            handler = _HANDLERS.get(node.called) if isinstance(node, Object) else None
            if handler is None:
                return None
            try:
                found = handler(self, node)
            except (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError) as error:
                raise CorruptCheckpoint(f"{node.called} has arguments that make no tensor ({error})"[:300]) from error
            if isinstance(found, list):
                return found
            node = found
        raise CorruptCheckpoint(f"a tensor is wrapped more than {_LAYERS} times")

    def _bare_storage(self, node: Persistent) -> list[Found] | None:
        key = node.key
        if not (isinstance(key, tuple) and len(key) >= 5 and key[0] == "storage"):
            return None
        storage = self.storages.storage(node)
        count = storage.source.size // storage.element.itemsize
        view = row_major((count,), storage.element.itemsize)
        return [Found("", Entry([], view.shape, storage.element, storage.source, view))]

    def _storage(self, node: Any) -> Storage:
        if isinstance(node, Persistent):
            return self.storages.storage(node)
        if isinstance(node, Object) and node.called == "torch.storage._load_from_bytes":
            if id(node) not in self._packed:  # tensors that share it stay the same ones
                self._packed[id(node)] = self.storages.packed(raw_bytes(node.args[0]))
            return self._packed[id(node)]
        if isinstance(node, Object) and node.called.startswith("torch.storage.") and node.args:
            return self._storage(node.args[0]) if isinstance(node.args[0], Persistent) else self._typed(node)
        raise CorruptCheckpoint("a tensor has no storage")

    def _typed(self, node: Object) -> Storage:
        inner = self._storage(node.state.get("_untyped_storage") if isinstance(node.state, Dict) else None)
        dtype = node.state.get("dtype")
        return inner._replace(element=of_torch(DTYPES[dtype.name]))

    def _tensor(self, node: Object) -> list[Found]:
        return self._strided(node.args, None)

    def _tensor_v3(self, node: Object) -> list[Found]:
        return self._strided(node.args, of_torch(dtype_of(node.args[6])))

    def _strided(self, args: Any, element: Element | None) -> list[Found]:
        storage = self._storage(args[0])
        kind = element or storage.element
        if kind.dtype is not None and (storage.big_endian or kind.unit):
            kind = of_torch(kind.dtype, big_endian=storage.big_endian)
        sizes, strides = ints(args[2]), ints(args[3])
        view = View(sizes, tuple(s * kind.itemsize for s in strides), args[1] * kind.itemsize, kind.itemsize)
        view.check(storage.source.size)
        return [Found("", Entry([], sizes, kind, storage.source, view))]

    def _first(self, node: Object) -> Any:
        return node.args[0]

    def _from_type(self, node: Object) -> Any:
        return Object(node.args[0], node.args[2])

    def _quantized(self, node: Object) -> list[Found]:
        found = self._strided(node.args, None)
        scales = node.args[4][1] if len(node.args[4]) > 1 else None
        if isinstance(scales, Object):
            found += [Found(".scales", item.entry) for item in self.find(scales) or []]
        return found

    def _sparse(self, node: Object) -> list[Found]:
        layout = node.args[0]
        name = layout.name if isinstance(layout, Global) else str(layout.args[0]).removeprefix("torch.")
        *indices, values = [self._one(part) for part in node.args[1][: 2 if name == "sparse_coo" else 3]]
        return [Found("", sparse_entry(name, indices, values, ints(node.args[1][len(indices) + 1])))]

    def _one(self, node: Any) -> Entry:
        found = self.find(node)
        if not found:
            raise CorruptCheckpoint("a part of a tensor is missing")
        return found[0].entry

    def _nested(self, node: Object) -> Any:
        return node.args[0]

    def _meta(self, node: Object) -> list[Found]:
        return [Found("", Entry([], ints(node.args[1]), of_torch(dtype_of(node.args[0])), unread="meta"))]

    def _array(self, node: Object) -> list[Found] | None:
        state = node.state
        if state is None:
            raise CorruptCheckpoint("a NumPy array has no content")
        shape, kind, fortran, data = state[1:5] if type(state[0]) is int else state[:4]
        if isinstance(data, list):  # of objects, which are looked at one by one
            return None
        return array_entries(raw_bytes(data), numpy_type(kind), ints(shape), fortran=bool(fortran))

    def _frombuffer(self, node: Object) -> list[Found]:
        data, kind, shape, order = node.args
        return array_entries(raw_bytes(data), numpy_type(kind), ints(shape), fortran=order == "F")


def dtype_of(node: Any) -> torch.dtype:
    """The dtype that a node names."""
    return DTYPES[node.name]


def ints(node: Any) -> tuple[int, ...]:
    """Sizes or strides."""
    if isinstance(node, Object) and node.called == "torch.Size":
        node = node.args[0]
    if isinstance(node, int):
        node = (node,)
    if not isinstance(node, (tuple, list)) or not all(type(number) is int for number in node):
        raise CorruptCheckpoint("a tensor's sizes or strides are no numbers")
    return tuple(node)


def raw_bytes(node: Any) -> Source:
    """The bytes that a node stands for, however its protocol wrote them."""
    for _ in range(_LAYERS):
        if isinstance(node, Object) and node.called in _BYTES:
            node = node.args[0] if node.args else b""
    if isinstance(node, (bytes, bytearray)):
        return Memory(node)
    if isinstance(node, str):
        return Memory(node.encode("latin-1"))
    if isinstance(node, Blob):
        part = Part(node.source, node.start, node.size)
        return Latin1Text(part) if node.text else part
    raise CorruptCheckpoint("an array has no bytes")


def numpy_type(node: Any) -> np.dtype[Any] | Element:
    """The type that ``numpy.dtype(…)`` and its state describe; `CorruptCheckpoint` if there is none."""
    if not isinstance(node, Object) or node.called not in ("numpy.dtype", "numpy.core.multiarray.dtype"):
        raise CorruptCheckpoint("an array has no type")
    base = node.args[0]
    if isinstance(base, Global):
        element = ml_dtype(base.name)
        if element is None:
            raise CorruptCheckpoint(f"an array has the unknown type {base.full}")
        return element
    state: Any = node.state or ()
    if len(state) > 4 and state[3]:
        return _structured(state)
    if len(state) > 2 and state[2]:
        return np.dtype((_plain_type(state[2][0]), ints(state[2][1])))
    element = ml_dtype(str(base))
    if element is not None:
        return element
    order: Any = state[1] if len(state) > 1 and state[1] in ("<", ">", "=", "|") else "="
    plain: np.dtype[Any] = np.dtype(base if isinstance(base, str) and len(base) < 64 else "")
    swapped: np.dtype[Any] = plain.newbyteorder(order)
    return swapped


def _plain_type(node: Any) -> np.dtype[Any]:
    kind = numpy_type(node)
    if isinstance(kind, Element):
        return np.dtype(f"V{kind.itemsize}")
    return kind


def _structured(state: Any) -> np.dtype[Any]:
    fields = [state[4].get(name) for name in state[3]]
    return np.dtype(
        {
            "names": list(state[3]),
            "formats": [_plain_type(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "itemsize": state[5],
        }
    )


_BYTES = frozenset({
    "_codecs.encode", "builtins.bytes", "builtins.bytearray", "__builtin__.bytes", "__builtin__.bytearray",
    "pickle.PickleBuffer",
})  # fmt: skip
_Handler = Callable[[Rebuild, Object], Any]
_HANDLERS: dict[str, _Handler] = {
    "torch._utils._rebuild_tensor": Rebuild._tensor,
    "torch._utils._rebuild_tensor_v2": Rebuild._tensor,
    "torch._utils._rebuild_tensor_v3": Rebuild._tensor_v3,
    "torch._utils._rebuild_parameter": Rebuild._first,
    "torch._utils._rebuild_parameter_with_state": Rebuild._first,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": Rebuild._first,
    "torch._utils._rebuild_device_tensor_from_numpy": Rebuild._first,
    "torch._utils._rebuild_xla_tensor": Rebuild._first,
    "torch._utils._rebuild_sparse_tensor": Rebuild._sparse,
    "torch._utils._rebuild_sparse_csr_tensor": Rebuild._sparse,
    "torch._utils._rebuild_qtensor": Rebuild._quantized,
    "torch._utils._rebuild_nested_tensor": Rebuild._nested,
    "torch._utils._rebuild_meta_tensor_no_storage": Rebuild._meta,
    "torch._tensor._rebuild_from_type": Rebuild._from_type,
    "torch._tensor._rebuild_from_type_v2": Rebuild._from_type,
    "torch.tensor._rebuild_from_type": Rebuild._from_type,
    "numpy.core.multiarray._reconstruct": Rebuild._array,
    "numpy._core.multiarray._reconstruct": Rebuild._array,
    "numpy.ma.core._mareconstruct": Rebuild._array,
    "numpy.core.numeric._frombuffer": Rebuild._frombuffer,
    "numpy._core.numeric._frombuffer": Rebuild._frombuffer,
}
KNOWN = frozenset(_HANDLERS) | _BYTES
