"""From a batch of any nesting to its tensors, each with the steps that lead to it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanscan import paddle_objects

__all__ = ["LABELS", "WIDE", "Leaf", "Step", "dotted", "leaves_of", "path_of", "shape_of"]

# One step: ("k", key) of a mapping, ("l", index) of a list, ("t", index) of a tuple, ("a", name) of an attribute.
Step = tuple[str, Any]
Leaf = tuple[tuple[Step, ...], Tensor]

_NUMBERS = (int, float, bool, np.number, np.bool_)
WIDE = frozenset({torch.uint16, torch.uint32, torch.uint64})  # few operators know these
LABELS = r"(.*_)?(labels?|targets?|class|classes|class_ids?|label_ids?)|y|ys|y_true|gt"  # in lower case
_NUMBER = re.compile(
    r"(?!(ignore|pad|background|max|min|num|n)_)((.*_)?(label|target|class)(_id)?|y|y_true|gt)|num_nodes|blank",
    re.IGNORECASE,
)
_NUMBERS_OF_SAMPLES = re.compile(rf"{LABELS}|(.*_)?(lengths?|lens?)", re.IGNORECASE)
_DEEPEST = 100
_SEQUENCES: dict[type, str] = {list: "l", tuple: "t"}


def leaves_of(batch: Any) -> list[Leaf]:
    """Every tensor, array and number of a batch, as tensors, in order.

    Tensors of PaddlePaddle are read in place. Dicts and other mappings, lists, tuples, named tuples and dataclasses are
    gone through, and so are graphs; a list of plain numbers is one tensor. A whole number is one where its name, or its
    place as the second of a sample, says that it is a label or a count of nodes; else it is an index, a step, a size.
    Text, None and objects of other types hold nothing to check.

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
    kind = _SEQUENCES.get(type(value))
    if kind is not None:
        _visit_sequence(kind, value, steps, found)
        return
    if type(value) is int:
        _add_integer(value, steps, found)
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
    _check_depth(steps)
    for step, child in _children(value):
        _visit(child, (*steps, step), found)


def _visit_sequence(kind: str, value: Sequence[Any], steps: tuple[Step, ...], found: list[Leaf]) -> None:
    """A plain list or tuple: the usual case, without a generator."""
    _check_depth(steps)
    if _is_one_array(kind, value, steps):
        _add_array(value, steps, found)
        return
    for i, child in enumerate(value):
        if type(child) is not int:
            _visit(child, (*steps, (kind, i)), found)
    if kind == "t" and len(value) == 2 and not isinstance(value[1], Tensor):
        _visit_label(value[0], value[1], (*steps, (kind, 1)), found)


def _check_depth(steps: tuple[Step, ...]) -> None:
    if len(steps) > _DEEPEST:
        raise ValueError(f"{path_of(steps[:3])}… is nested deeper than {_DEEPEST} levels: does it hold itself?")


def _visit_label(first: Any, second: Any, steps: tuple[Step, ...], found: list[Leaf]) -> None:
    """The label of a sample `(image, 5)`, or those of a batch `(images, (5, 0, 3))`."""
    array = isinstance(first, (Tensor, np.ndarray))
    if isinstance(second, (int, np.integer)):
        if array and not isinstance(second, bool) and _is_sample(first, root=len(steps) == 1):
            _add_number(int(second), steps, found)
    elif type(second) is tuple and len(steps) == 1 and second and all(type(item) is int for item in second):
        samples = first.ndim > 1 if array else isinstance(first, (list, tuple)) and len(first) > 2
        if samples and len(first) == len(second):
            _add_array(second, steps, found)


def _is_sample(value: Any, root: bool) -> bool:
    """False for what may be a whole batch: a number beside it is that of its samples, or its index."""
    return value.ndim < 4 and (not root or value.ndim == 1 or (value.ndim == 3 and value.shape[0] in (1, 3, 4)))


def _children(value: Any) -> Iterator[tuple[Step, Any]]:
    if hasattr(type(value), "node_types") and hasattr(type(value), "edge_types"):
        return _graph_of_types(value)
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
    if "edge_index" in getattr(value, "__dict__", ()):
        return ((("a", name), child) for name, child in vars(value).items())
    return iter(())


def _graph_of_types(graph: Any) -> Iterator[tuple[Step, Any]]:
    """A `HeteroData`: what it has of each type of nodes and edges. Any other key would be added to it by being read."""
    for kind in [*graph.node_types, *graph.edge_types]:
        yield ("k", kind), graph[kind]
    for name, value in graph.to_dict().get("_global_store", {}).items():
        yield ("a", name), value


def _is_one_array(kind: str, value: Sequence[Any], steps: tuple[Step, ...]) -> bool:
    """A list of numbers; a tuple of them only where it has a name that says what they are, as sizes have none."""
    if not value or not isinstance(value[0], _NUMBERS) or not all(isinstance(item, _NUMBERS) for item in value):
        return False
    named = steps[-1:] and steps[-1][0] in "ka" and _NUMBERS_OF_SAMPLES.fullmatch(str(steps[-1][1]))
    return kind == "l" or bool(named)


def _add_array(value: Any, steps: tuple[Step, ...], found: list[Leaf]) -> None:
    try:
        array = np.asarray(value)
    except OverflowError:  # an int beyond 64 bits
        return
    if array.dtype.kind in "iu" and array.ndim == 0:
        _add_integer(int(array), steps, found)
    elif array.dtype.kind in "biufc":
        found.append((steps, _as_tensor(array)))


def _add_integer(value: int, steps: tuple[Step, ...], found: list[Leaf]) -> None:
    """A whole number of its own; one without a telling name is none of the batch's values."""
    named = steps[-1:] and steps[-1][0] in "ka" and _NUMBER.fullmatch(str(steps[-1][1]))
    if named:
        _add_number(value, steps, found)


def _add_number(value: int, steps: tuple[Step, ...], found: list[Leaf]) -> None:
    if -(2**63) <= value < 2**63:
        found.append((steps, _number(value)))


@lru_cache(maxsize=4096)  # there are few classes, and the tensors are only read
def _number(value: int) -> Tensor:
    return torch.from_numpy(np.array(value, dtype=np.int64))


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
