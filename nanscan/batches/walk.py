"""From a batch of any nesting to its tensors, each with the steps that lead to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanscan import paddle_objects

__all__ = ["WIDE", "Leaf", "Step", "dotted", "leaves_of", "path_of", "shape_of"]

# One step: ("k", key) of a mapping, ("l", index) of a list, ("t", index) of a tuple, ("a", name) of an attribute.
Step = tuple[str, Any]
Leaf = tuple[tuple[Step, ...], Tensor]

_NUMBERS = (int, float, bool, np.number, np.bool_)
WIDE = frozenset({torch.uint16, torch.uint32, torch.uint64})  # few operators know these
_DEEPEST = 100
_SEQUENCES: dict[type, str] = {list: "l", tuple: "t"}


def leaves_of(batch: Any) -> list[Leaf]:
    """Every tensor, array and number of a batch, as tensors, in order.

    Tensors of PaddlePaddle are read in place. Dicts and other mappings, lists, tuples, named tuples and dataclasses are
    gone through; a list of plain numbers is one tensor. Text, None and objects of other types hold nothing to check.

    >>> [(path_of(steps), tuple(value.shape)) for steps, value in leaves_of({"x": torch.ones(2, 3), "id": ["a", "b"]})]
    [('batch["x"]', (2, 3))]
    """
    found: list[Leaf] = []
    _visit(batch, (), found)
    return found


def _visit(value: Any, steps: tuple[Step, ...], found: list[Leaf]) -> None:
    if isinstance(value, Tensor):
        found.append((steps, value if value.dtype not in WIDE else value.to(torch.int64)))
        return
    if value is None or isinstance(value, (str, bytes)):
        return
    if isinstance(value, (np.ndarray, np.generic, float)):
        _add_array(value, steps, found)
        return
    if paddle_objects.is_tensor(value):
        if value._is_initialized():
            _visit(paddle_objects.as_torch(value), steps, found)
        return
    if len(steps) > _DEEPEST:
        raise ValueError(f"{path_of(steps[:3])}… is nested deeper than {_DEEPEST} levels: does it hold itself?")
    if type(value) is list and _is_numbers(value):
        _add_array(value, steps, found)
        return
    kind = _SEQUENCES.get(type(value))
    if kind is not None:  # the usual case, without a generator
        for i, child in enumerate(value):
            _visit(child, (*steps, (kind, i)), found)
        return
    for step, child in _children(value):
        _visit(child, (*steps, step), found)


def _children(value: Any) -> Iterator[tuple[Step, Any]]:
    if isinstance(value, Mapping):
        return ((("k", key), child) for key, child in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ((("a", name), getattr(value, name)) for name in value._fields)
    if isinstance(value, (list, tuple)):
        kind = "l" if isinstance(value, list) else "t"
        return (((kind, i), child) for i, child in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((("a", item.name), getattr(value, item.name)) for item in dataclasses.fields(value))
    if not isinstance(value, type) and callable(getattr(value, "keys", None)) and hasattr(value, "__getitem__"):
        return ((("k", key), value[key]) for key in value.keys())  # noqa: SIM118 (a duck-typed mapping)
    return iter(())


def _is_numbers(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], _NUMBERS) and all(isinstance(item, _NUMBERS) for item in value)


def _add_array(value: Any, steps: tuple[Step, ...], found: list[Leaf]) -> None:
    try:
        array = np.asarray(value)
    except OverflowError:  # an int beyond 64 bits
        return
    if array.dtype.kind in "biufc" and not (array.dtype.kind == "i" and array.ndim == 0):
        found.append((steps, _as_tensor(array)))


def _as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """The array's memory as a tensor; a copy where PyTorch can't look at it (read-only, big-endian, wide types)."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind == "u" and size > 1:
        array = array.astype(np.int64)
    elif kind in "fc" and size > (8 if kind == "f" else 16):
        array = array.astype(np.float64 if kind == "f" else np.complex128)
    elif not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def path_of(steps: tuple[Step, ...]) -> str:
    """The steps as one would type them.

    >>> path_of((("k", "image"), ("l", 3), ("a", "mask")))
    'batch["image"][3].mask'
    """
    return "batch" + "".join(_typed(kind, key) for kind, key in steps)


def _typed(kind: str, key: Any) -> str:
    if kind == "a":
        return f".{key}"
    return f'["{key}"]' if isinstance(key, str) else f"[{key!r}]"


def dotted(steps: tuple[Step, ...]) -> str:
    """The steps as `BatchSpec(fields=…)` names them.

    >>> dotted((("k", "labels"), ("k", "mask"))), dotted((("t", 1),)), dotted(())
    ('labels.mask', '1', '')
    """
    return ".".join(str(key) for _, key in steps)


def shape_of(value: Tensor) -> tuple[int, ...]:
    """The shape of a tensor; of a nested one (which, strided, has none) the sizes that differ are given as -1.

    >>> shape_of(torch.zeros(2, 3))
    (2, 3)
    """
    if value.is_nested and value.layout is torch.strided:
        return (value.size(0), *(-1,) * (value.dim() - 1))
    return tuple(value.shape)
