"""One tensor of a file before it is read: its names, what it looks like, and where its bytes lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nanscan.errors import CorruptCheckpoint
from nanscan.files.elements import Element
from nanscan.files.layout import Block, View
from nanscan.files.source import Source, read_bytes

__all__ = ["BLOCK_BYTES", "Contents", "Entry", "Pieces", "Place"]

BLOCK_BYTES = 1 << 24  # what is held of a file at a time
_REUSED = 1 << 30  # bytes that may be read over and over through views, beyond 64 times what a file holds

Place = Callable[[tuple[int, ...]], tuple[int, ...]]


@dataclass
class Entry:
    """One tensor of a file.

    Attributes:
        names: its name, and those of the tensors that are the same one (tied weights).
        shape: sizes; of a sparse tensor the dense ones.
        element: what its elements are.
        source, view: where its bytes lie; of a sparse tensor those of its values.
        unread: why it has no bytes to read (``"meta"``); "" if it has.
        place: from an index in the view to one in ``shape``, where they differ (sparse tensors).
        build: makes the tensor where the view alone does not (sparse tensors).
        check: raises `CorruptCheckpoint` if what belongs to it is wrong (a sparse tensor's indices).
    """

    names: list[str]
    shape: tuple[int, ...]
    element: Element
    source: Source | None = None
    view: View | None = None
    unread: str = ""
    place: Place | None = None
    build: Callable[[], Tensor] | None = None
    check: Callable[[], None] | None = None

    @property
    def scanned(self) -> bool:
        """Whether it can hold a NaN or Inf at all."""
        return not self.unread and self.element.floating

    @property
    def stored(self) -> int:
        """How many bytes are read for it."""
        return 0 if self.view is None or self.unread else self.view.stored

    def tensor(self) -> Tensor:
        """The tensor, in memory of its own."""
        if self.unread or self.view is None:
            raise CorruptCheckpoint(f"'{self.names[0]}' cannot be read: {self.unread or 'no data'}")
        return self.build() if self.build is not None else self.values()

    def values(self) -> Tensor:
        """What the view shows, in memory of its own."""
        assert self.source is not None and self.view is not None
        if self.view.stored > self.source.size * 64 + _REUSED:
            raise CorruptCheckpoint(f"'{self.names[0]}' of shape {list(self.shape)} claims more than its storage holds")
        memory = bytearray(self.view.stored)
        whole = memoryview(memory)
        for block in self.view.blocks(BLOCK_BYTES):
            start = block.start * self.view.itemsize
            _gather(self.source, block, self.view.itemsize, whole[start : start + block.numel * self.view.itemsize])
        order = self.view.order
        flat = self.element.tensor(whole)
        if self.view.numel == 0:
            return torch.empty(self.view.shape, dtype=flat.dtype, device="cpu")
        sizes = [self.view.shape[d] for d in order]
        ordered = flat.view(sizes).permute(_inverse(order))
        kept = [n if d in order else 1 for d, n in enumerate(self.view.shape)]
        return ordered.reshape(kept).expand(self.view.shape)


@dataclass
class Contents:
    """Everything in a file: its tensors, and what should be told about it.

    Attributes:
        format: such as ``"torch zip"``.
        entries: its tensors.
        notes: a sentence each.
        held: how many bytes of tensors the file holds.
        close: gives back what reading the tensors needs.
    """

    format: str
    entries: list[Entry]
    notes: list[str] = field(default_factory=list)
    held: int = 0
    close: Callable[[], None] = lambda: None

    def check(self) -> Contents:
        """Refuse views that together would read far more than there is.

        Raises:
            CorruptCheckpoint: a file made to keep its reader busy.
        """
        wanted = sum(entry.stored for entry in self.entries)
        if wanted > 64 * self.held + _REUSED:
            raise CorruptCheckpoint(
                f"its tensors are views of {wanted} bytes over storages of {self.held} bytes: far more than they hold"
            )
        return self


class Pieces:
    """Reads entries block by block into one buffer that is used again and again."""

    def __init__(self, limit: int = BLOCK_BYTES) -> None:
        self._limit = limit
        self._buffer = bytearray(limit + 64)

    def of(self, entry: Entry) -> Iterator[tuple[Block, Tensor]]:
        """Each block of ``entry`` and its elements, 1-dim; valid until the next one."""
        if entry.view is None or entry.source is None or entry.unread:
            return
        for block in entry.view.blocks(self._limit):
            into = memoryview(self._buffer)[: block.numel * entry.view.itemsize]
            _gather(entry.source, block, entry.view.itemsize, into)
            yield block, entry.element.tensor(into)


def _inverse(order: list[int]) -> list[int]:
    """The permutation that brings dimensions in memory order back into their own order."""
    return [order.index(d) for d in sorted(order)]


def _gather(source: Source, block: Block, itemsize: int, into: memoryview) -> None:
    """The elements of a block, side by side."""
    if block.span == block.numel * itemsize and _dense(block, itemsize):
        source.readinto(block.offset, into)
        return
    raw = np.frombuffer(read_bytes(source, block.offset, block.span), np.uint8)
    items = np.lib.stride_tricks.as_strided(raw, (*block.sizes, itemsize), (*block.strides, 1), writeable=False)
    np.copyto(np.frombuffer(into, np.uint8).reshape(items.shape), items)


def _dense(block: Block, itemsize: int) -> bool:
    expected = [math.prod(block.sizes[d + 1 :]) * itemsize for d in range(len(block.sizes))]
    return list(block.strides) == expected
