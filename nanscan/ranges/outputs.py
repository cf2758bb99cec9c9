"""The tensors in what a module returns, and which of them are new."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from nanscan.engine.result import BadInput
from nanscan.engine.tensors import resolve

__all__ = ["Seen", "elements_of", "tensors_in"]

DEPTH = 8
_in_transform = torch._C._functorch.is_functorch_wrapped_tensor
_SIMPLE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


def tensors_in(output: Any, depth: int = DEPTH) -> Iterable[Tensor]:
    """Every floating-point or complex tensor in nested tuples, lists, dicts and dataclasses."""
    if isinstance(output, Tensor):
        return (output,) if output.is_floating_point() or output.is_complex() else ()
    return _tensors_in_parts(output, depth) if depth and output is not None else ()


def _tensors_in_parts(output: Any, depth: int) -> Iterator[Tensor]:
    for part in _parts(output):
        yield from tensors_in(part, depth - 1)


def _parts(output: Any) -> Iterator[Any]:
    if isinstance(output, Mapping):
        yield from output.values()
    elif isinstance(output, (tuple, list)):
        yield from output
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield getattr(output, field.name, None)


def elements_of(tensor: Tensor) -> Tensor | None:
    """The plain tensor that holds the elements; None if there is none, or none that can be read."""
    if type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided:
        if tensor.numel() == 0 or _in_transform(tensor):
            return None
        return tensor if tensor.dtype in _SIMPLE else _resolved(tensor)
    return _resolved(tensor)


def _resolved(tensor: Tensor) -> Tensor | None:
    if type(tensor) is Tensor and tensor.is_neg():
        tensor = tensor.detach().resolve_neg()
    try:
        values = resolve(tensor)
    except BadInput:
        return None
    return values if values.numel() else None


class Seen:
    """Which tensors of this step were measured already, each in the state (version) that it had then.

    A container returns the tensor of its last child; the child is the one to name. Tensors are not kept alive.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def is_new(self, tensor: Tensor) -> bool:
        """True the first time that a tensor comes in this state."""
        version = -1 if tensor.is_inference() else tensor._version
        known = self._known.get(id(tensor))
        if known is not None and known[1] == version and known[0]() is tensor:
            return False
        self._known[id(tensor)] = (weakref.ref(tensor), version)
        return True

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
