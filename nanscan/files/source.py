"""Where the bytes of a file's tensors come from: the file itself, a compressed member of an archive, a pickled text."""

from __future__ import annotations

import codecs
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from nanscan.errors import CheckpointError, CorruptCheckpoint

__all__ = ["Compressed", "FileBytes", "Latin1Text", "Memory", "Part", "Source", "UnreadableFile", "read_bytes"]

BLOCK = 1 << 16


class UnreadableFile(CheckpointError):
    """A file that nanscan has no reader for, or whose reader needs a package that is not installed."""


class Source(Protocol):
    """Bytes that are read a piece at a time; nothing is kept in memory and nothing is mapped."""

    size: int

    def readinto(self, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``start`` on; `CorruptCheckpoint` if there are fewer."""


class FileBytes:
    """A stretch of a file. Not mapped: a file that is cut off meanwhile ends in an error, not in SIGBUS.

    Args:
        file: opened for reading, unbuffered.
        start, size: the stretch, in bytes.
    """

    def __init__(self, file: Any, start: int, size: int) -> None:
        self.file = file
        self.start = start
        self.size = size

    def readinto(self, start: int, into: memoryview) -> None:
        if start < 0 or start + len(into) > self.size:
            raise CorruptCheckpoint(f"bytes {start} to {start + len(into)} are asked for, but there are {self.size}")
        self.file.seek(self.start + start)
        _fill(self.file, into)


class Memory:
    """Bytes that are in memory already."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = memoryview(data)
        self.size = len(data)

    def readinto(self, start: int, into: memoryview) -> None:
        if start < 0 or start + len(into) > self.size:
            raise CorruptCheckpoint(f"bytes {start} to {start + len(into)} are asked for, but there are {self.size}")
        into[:] = self.data[start : start + len(into)]


class Part:
    """A stretch of another source."""

    def __init__(self, source: Source, start: int, size: int) -> None:
        if start < 0 or size < 0 or start + size > source.size:
            raise CorruptCheckpoint(
                f"byte {start + size} is asked for, but there are {source.size}: the file is cut off"
            )
        self.source = source
        self.start = start
        self.size = size

    def readinto(self, start: int, into: memoryview) -> None:
        if start < 0 or start + len(into) > self.size:
            raise CorruptCheckpoint(f"bytes {start} to {start + len(into)} are asked for, but there are {self.size}")
        self.source.readinto(self.start + start, into)


class Compressed:
    """A deflated member of an archive: unpacked while it is read, front to back."""

    def __init__(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
        self.archive = archive
        self.member = member
        self.size = member.file_size
        self._stream: Any | None = None
        self._at = 0

    def readinto(self, start: int, into: memoryview) -> None:
        if start < 0 or start + len(into) > self.size:
            raise CorruptCheckpoint(
                f"{self.member.filename} holds {self.size} bytes: {start + len(into)} are asked for"
            )
        try:
            self._seek(start)
            assert self._stream is not None
            _fill(self._stream, into)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise CorruptCheckpoint(f"{self.member.filename} cannot be unpacked: {error}") from error
        self._at += len(into)

    def _seek(self, start: int) -> None:
        if self._stream is None or start < self._at:
            self._stream, self._at = self.archive.open(self.member), 0
        assert self._stream is not None
        while self._at < start:
            self._at += len(self._stream.read(min(BLOCK, start - self._at))) or self._ended()

    def _ended(self) -> int:
        raise CorruptCheckpoint(f"{self.member.filename} is shorter than its archive says")


class Latin1Text:
    """Bytes that protocol 0 to 2 of pickle keeps as text (latin-1 in UTF-8), decoded while they are read.

    Args:
        text: where the UTF-8 lies.
    """

    def __init__(self, text: Source) -> None:
        self.text = text
        self.size = sum(_characters(piece) for piece in _pieces(text))
        self._restart()

    def _restart(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._taken = self._at = 0
        self._ready = b""

    def readinto(self, start: int, into: memoryview) -> None:
        if start < self._at:
            self._restart()
        self._take(start - self._at)
        done = 0
        while done < len(into):
            piece = self._take(min(len(into) - done, BLOCK))
            into[done : done + len(piece)] = piece
            done += len(piece)

    def _take(self, count: int) -> bytes:
        """The next ``count`` bytes; where there are more than a block of them (to be passed over), the last ones."""
        while len(self._ready) < count:
            if len(self._ready) >= BLOCK:
                self._at, count, self._ready = self._at + len(self._ready), count - len(self._ready), b""
            self._more()
        piece, self._ready = self._ready[:count], self._ready[count:]
        self._at += count
        return piece

    def _more(self) -> None:
        size = min(BLOCK, self.text.size - self._taken)
        if size == 0:
            raise CorruptCheckpoint(f"an array's text makes {self._at + len(self._ready)} bytes, not {self.size}")
        raw = read_bytes(self.text, self._taken, size)
        self._taken += size
        try:
            self._ready += self._decoder.decode(raw).encode("latin-1")
        except UnicodeError as error:
            raise CorruptCheckpoint(f"an array is kept as text that is not latin-1 in UTF-8: {error}") from error


def _pieces(source: Source) -> Iterator[bytearray]:
    for start in range(0, source.size, BLOCK):
        yield read_bytes(source, start, min(BLOCK, source.size - start))


def _characters(utf8: bytearray) -> int:
    """How many characters begin in ``utf8``: every byte but those that continue one."""
    return int(np.count_nonzero((np.frombuffer(utf8, np.uint8) & 0xC0) != 0x80))


def read_bytes(source: Source, start: int, size: int) -> bytearray:
    """``size`` bytes of ``source`` from ``start`` on; the size is checked before memory is taken."""
    if start < 0 or size < 0 or start + size > source.size:
        raise CorruptCheckpoint(f"bytes {start} to {start + size} are asked for, but there are {source.size}")
    raw = bytearray(size)
    source.readinto(start, memoryview(raw))
    return raw


def _fill(stream: Any, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = stream.readinto(into[done:])
        if not count:
            raise CorruptCheckpoint(f"the file ends {len(into) - done} bytes too early: it is cut off")
        done += count
