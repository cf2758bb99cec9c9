"""Tensors that a reducer makes for its answer: their shared memory is gone before a started process reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nanscan.pickling.light import spawning
from nanscan.pickling.parts import saved
from nanscan.pickling.places import Place

__all__ = ["LOST", "is_lost_on_the_way"]

_multiprocessing: Any = torch.multiprocessing  # not typed
LOST = (
    "pickling it makes a new tensor, and the shared memory of that is gone before a started process opens it "
    "(RuntimeError there: unable to resize file <filename not specified> to the right size)",
    "drop it in __getstate__ and make it anew in the process (of a torch.Generator keep the seed); or call "
    "torch.multiprocessing.set_sharing_strategy('file_system')",
)


def is_lost_on_the_way(place: Place, table: Any) -> bool:
    """Whether the tensor at `place`, which came out of a reducer's answer, is held by nobody else.

    A tensor is sent by the number of an open file, which PyTorch does not keep open for the tensor's sake.
    """
    tensor = place.value
    if _multiprocessing.get_sharing_strategy() != "file_descriptor":
        return False
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.numel() == 0 or tensor.is_shared():
        return False
    maker = next(p for p in place.upwards() if p.made < place.made)
    with spawning(True):
        again = saved(maker.value, table)
    return isinstance(again, str) or not any(_same_memory(held, tensor) for held in _tensors(again))


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory is somebody's: another tensor over it, as `parameter.data`, keeps it alive."""
    if a is b:
        return True
    return a.layout is torch.strided and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _tensors(value: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for held in dict.values(value):
            yield from _tensors(held, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for held in list(value):
            yield from _tensors(held, depth - 1)
