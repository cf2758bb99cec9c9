"""A strided view of stored bytes: checked, brought into memory order, and cut into blocks of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanscan.errors import CorruptCheckpoint

__all__ = ["Block", "View", "row_major"]

MAX_DIMS = 64  # PyTorch's own limit
MAX_SIZE = 1 << 62


class Block(NamedTuple):
    """A part of a view: ``sizes`` and ``strides`` of what is read from ``offset`` on; its place in memory order."""

    start: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    span: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class View:
    """How the elements of one tensor lie in the bytes of its storage.

    Attributes:
        shape: sizes.
        strides: **bytes** from one element to the next in each dimension.
        offset: bytes before the first element.
        itemsize: bytes of an element.

    Raises:
        CorruptCheckpoint: not such a view (negative sizes or strides, more than 64 dimensions …).
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    itemsize: int

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides) or len(self.shape) > MAX_DIMS:
            raise CorruptCheckpoint(f"a tensor has {len(self.shape)} sizes and {len(self.strides)} strides")
        for number in (*self.shape, *self.strides, self.offset):
            if type(number) is not int or not 0 <= number < MAX_SIZE:
                raise CorruptCheckpoint(f"a size, stride or offset of a tensor is {str(number)[:40]}")
        if self.numel >= MAX_SIZE:
            raise CorruptCheckpoint(f"a tensor claims a shape of {list(self.shape)}: more than memory can address")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The first byte behind the last element."""
        if self.numel == 0:
            return 0
        return self.offset + self.itemsize + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def order(self) -> list[int]:
        """The dimensions that move through memory, from the largest stride to the smallest."""
        moving = [d for d, n in enumerate(self.shape) if n > 1 and self.strides[d] > 0]
        return sorted(moving, key=lambda d: -self.strides[d])

    @property
    def repeat(self) -> int:
        """How many elements each stored one stands for (an expanded tensor has strides of 0)."""
        return math.prod(n for n, s in zip(self.shape, self.strides, strict=True) if s == 0)

    @property
    def stored(self) -> int:
        """How many bytes are read for it."""
        return self.numel // max(1, self.repeat) * self.itemsize

    def check(self, size: int) -> None:
        """Raise `CorruptCheckpoint` if the view leaves a storage of ``size`` bytes."""
        if self.end > size:
            raise CorruptCheckpoint(
                f"a tensor of shape {list(self.shape)} reaches to byte {self.end} of a storage of {size} bytes"
            )

    def blocks(self, limit: int) -> Iterator[Block]:
        """Blocks in memory order, none of which reads or makes more than ``limit`` bytes."""
        if self.numel == 0:
            return iter(())
        sizes, strides = self._merged()
        return _cut(Block(0, self.offset, sizes, strides, 0), self.itemsize, limit)

    def _merged(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides in memory order, neighbours joined where one continues the other."""
        sizes: list[int] = []
        strides: list[int] = []
        for d in self.order:
            if strides and strides[-1] == self.shape[d] * self.strides[d]:
                sizes[-1] *= self.shape[d]
                strides[-1] = self.strides[d]
            else:
                sizes.append(self.shape[d])
                strides.append(self.strides[d])
        return tuple(sizes), tuple(strides)

    def index(self, place: int) -> tuple[int, ...]:
        """The index of the element that comes at ``place`` in memory order."""
        full = [0] * len(self.shape)
        for d in reversed(self.order):
            place, full[d] = divmod(place, self.shape[d])
        return tuple(full)

    def first(self, places: NDArray[np.int64]) -> tuple[int, ...]:
        """Of the elements at ``places`` in memory order, the index of the one that is first in row-major order."""
        if self.order == sorted(self.order):
            return self.index(int(places.min()))
        left, flat = places, np.zeros_like(places)
        weights = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        for d in reversed(self.order):
            left, at = np.divmod(left, self.shape[d])
            flat += at * weights[d]
        return self.index(int(places[int(flat.argmin())]))


def row_major(shape: Sequence[int], itemsize: int, offset: int = 0) -> View:
    """The view of a contiguous tensor.

    >>> row_major((2, 3), 4).strides
    (12, 4)
    """
    strides: list[int] = []
    step = itemsize
    for n in reversed([n for n in shape]):
        strides.append(step)
        step = min(step * max(n, 1), MAX_SIZE - 1) if type(n) is int else 0
    return View(tuple(shape), tuple(reversed(strides)), offset, itemsize)


def _cut(block: Block, itemsize: int, limit: int) -> Iterator[Block]:
    span = _span(block.sizes, block.strides, itemsize)
    if max(span, block.numel * itemsize) <= limit or not block.sizes:
        yield block._replace(span=span)
        return
    sizes, strides = block.sizes[1:], block.strides[1:]
    inner, numel = _span(sizes, strides, itemsize), math.prod(sizes)
    rows = 1
    if max(inner, numel * itemsize) <= limit:
        rows = max(1, min((limit - inner) // block.strides[0] + 1, limit // (numel * itemsize)))
    for row in range(0, block.sizes[0], rows):
        count = min(rows, block.sizes[0] - row)
        part = Block(
            block.start + row * numel, block.offset + row * block.strides[0], (count, *sizes), block.strides, 0
        )
        if count == 1:
            part = part._replace(sizes=sizes, strides=strides)
        yield from _cut(part, itemsize, limit)


def _span(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    return itemsize + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
