"""What paddle.save writes, cut into regions with a digest each: a tensor's bytes by its name, and what lies between."""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterator, Sequence
from typing import Any

import xxhash

from nanscan.checkpoint.digest import Region
from nanscan.checkpoint.paddle_values import Stored
from nanscan.checkpoint.writer import PART, DigestingWriter

__all__ = ["RecordingBuffer"]

_APART = 64 << 10  # bytes from which pickle writes a value by itself; shorter ones lie within a frame
_PAYLOADS = {"SHORT_BINBYTES": 1, "BINBYTES": 4, "BINBYTES8": 8}  # opcode -> bytes of its length
_AHEAD = 64  # tensors that are looked through for the one that was written: a tensor given twice is written once


class RecordingBuffer(io.BytesIO):
    """Takes the place of the memory buffer that paddle.save writes into; the bytes go on to a file.

    Args:
        written: where they go.
        tensors: what is stored, in the order of the state.

    Attributes:
        regions: of everything written so far, without a gap.
    """

    def __init__(self, written: DigestingWriter, tensors: Sequence[Stored]) -> None:
        super().__init__()
        self.regions: list[Region] = []
        self._written = written
        self._tensors = tensors
        self._next = 0

    def write(self, data: Any) -> int:
        start, size = self._written.size, len(data)
        self._written.write(data)
        name = self._name_of(data) if size >= _APART else None
        if name is None and size < 4 * _APART:
            self.regions += self._within(data, start)
            return size
        for at in range(start, start + size, PART):
            length = min(PART, start + size - at)
            digest = self._written.digest(at, length) or xxhash.xxh3_128_digest(data[at - start : at - start + length])
            self.regions.append(_region(name, at, length, digest.hex()))
        return size

    def _within(self, data: bytes, start: int) -> Iterator[Region]:
        """The regions of a frame: tensors, and what is around each."""
        at = 0
        for payload in _payloads(data):
            name = self._name_of(data[payload])
            if name is not None:
                yield from _around(data, at, payload.start, start)
                yield _region(name, start + payload.start, len(data[payload]), xxhash.xxh3_128_hexdigest(data[payload]))
                at = payload.stop
        yield from _around(data, at, len(data), start)

    def _name_of(self, payload: bytes) -> str | None:
        """Which tensor these bytes are of."""
        for i in range(self._next, min(self._next + _AHEAD, len(self._tensors))):
            if self._tensors[i].size == len(payload) and (len(payload) >= _APART or self._tensors[i].has(payload)):
                self._next = i + 1
                return self._tensors[i].path
        return None


def _region(name: str | None, start: int, size: int, digest: str) -> Region:
    return Region("pickle data", start, size, digest, () if name is None else (name,))


def _around(data: bytes, at: int, end: int, start: int) -> Iterator[Region]:
    if end > at:
        yield _region(None, start + at, end - at, xxhash.xxh3_128_hexdigest(data[at:end]))


def _payloads(data: bytes) -> Iterator[slice]:
    """Where byte strings lie in a run of opcodes; it may end in the head of one that follows by itself."""
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name in _PAYLOADS and argument and position is not None:
                begin = position + 1 + _PAYLOADS[opcode.name]
                yield slice(begin, begin + len(argument))
    except ValueError:  # the end
        return
