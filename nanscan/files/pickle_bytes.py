"""Reads a pickle's bytes front to back: short arguments into memory, long ones left where they are."""

from __future__ import annotations

import struct

from nanscan.errors import CorruptCheckpoint
from nanscan.files.nodes import Blob
from nanscan.files.source import BLOCK, Source, read_bytes

__all__ = ["PickleBytes"]

_INLINE = 1 << 16  # a byte string longer than this stays in the file
_INLINE_TEXT = 1 << 20
_LINE = 1 << 26
_NUMBER = 1 << 10
_KEPT = 1 << 29  # of everything that is not left in the file
_SIZES = {1: struct.Struct("<B"), 4: struct.Struct("<I"), 8: struct.Struct("<Q")}


class PickleBytes:
    """A cursor over a `Source`.

    Args:
        source: where the pickle lies.
        at: its first byte.
    """

    def __init__(self, source: Source, at: int = 0) -> None:
        self.source = source
        self._base = at  # of the buffer
        self._buffer = b""
        self._at = 0
        self._kept = 0

    @property
    def at(self) -> int:
        """The position in the source."""
        return self._base + self._at

    @property
    def left(self) -> int:
        """How many bytes follow."""
        return self.source.size - self.at

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        end = self._at + count
        if end > len(self._buffer):
            self._refill(count)
            end = count
        piece = self._buffer[self._at : end]
        self._at = end
        return piece

    def _refill(self, count: int) -> None:
        if count > self.left:
            raise CorruptCheckpoint(f"the pickle breaks off at byte {self.source.size}: it is cut off")
        self._base, self._at = self.at, 0
        self._buffer = bytes(read_bytes(self.source, self._base, min(max(count, BLOCK), self.left)))

    def skip(self, count: int) -> None:
        """Pass over ``count`` bytes."""
        if count > self.left:
            raise CorruptCheckpoint(
                f"{count} bytes should follow byte {self.at}, but there are {self.left}: it is cut off"
            )
        self._base, self._buffer, self._at = self.at + count, b"", 0

    def line(self) -> bytes:
        """Up to the next newline, without it."""
        parts: list[bytes] = []
        length = 0
        while True:
            if self._at == len(self._buffer):
                self._refill(1)
                self._at = 0
            end = self._buffer.find(b"\n", self._at)
            parts.append(self._buffer[self._at : end if end >= 0 else None])
            length += len(parts[-1])
            self._at = end + 1 if end >= 0 else len(self._buffer)
            if end >= 0:
                return b"".join(parts)
            if length > _LINE:
                raise CorruptCheckpoint("the pickle holds a line of more than 64 MiB")

    def sized(self, width: int) -> int:
        """An unsigned little-endian number of ``width`` bytes."""
        return int(_SIZES[width].unpack(self.read(width))[0])

    def data(self, width: int) -> bytes | Blob:
        """A byte string after its length in ``width`` bytes."""
        size = self.sized(width)
        if size <= _INLINE:
            return self._keep(size)
        return self._blob(size, text=False)

    def text(self, width: int) -> str | Blob:
        """A text in UTF-8 after its length in ``width`` bytes."""
        size = self.sized(width)
        if size > _INLINE_TEXT:
            return self._blob(size, text=True)
        try:
            return self._keep(size).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint(f"a text in the pickle is not UTF-8: {error}") from error

    def number(self, width: int) -> int:
        """A signed number of any length, after its length in ``width`` bytes."""
        size = self.sized(width)
        if size > _NUMBER:
            raise CorruptCheckpoint(f"the pickle holds a number of {size} bytes")
        return int.from_bytes(self.read(size), "little", signed=True)

    def _keep(self, size: int) -> bytes:
        self._kept += size
        if self._kept > _KEPT:
            raise CorruptCheckpoint(f"the pickle holds more than {_KEPT >> 20} MiB of text: no checkpoint does")
        return self.read(size)

    def _blob(self, size: int, *, text: bool) -> Blob:
        start = self.at
        self.skip(size)
        return Blob(self.source, start, size, text)
