"""The file that torch.save writes into: digests of what is written, and the system's own error if that fails."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import xxhash

from nanscan.checkpoint.turns import give_way

__all__ = ["CHUNK", "PART", "DigestingWriter"]

PART = 16 << 20  # a longer piece gets a digest for each so many bytes, so that several threads can compare them
CHUNK = 256 << 10  # bytes copied, hashed and written at a time: they stay in a core's own cache meanwhile
_AHEAD = 4 << 20  # bytes after which the disk is told to begin
_TINY = 512  # pieces below this (headers, padding) are kept as they are
_LIBC = ctypes.CDLL(None)
_digest_of = xxhash.xxh3_128_digest


class DigestingWriter:
    """A writable file over ``fd`` that knows the digest of every piece written to it.

    What is hashed is a private copy, the very bytes that go to the system: a tensor that changes meanwhile can't part
    the two. torch turns an exception from here into another one at times; the first is kept in ``failure``.

    Args:
        fd: of an empty file, open for writing.
        before: called before the first byte; what it raises is kept in ``failure`` too.
    """

    def __init__(self, fd: int, before: Callable[[], None] | None = None) -> None:
        self.size = 0
        self.failure: BaseException | None = None
        self._fd = fd
        self._before = before
        self._ready = False  # past `before`, and without a failure
        self._digests: dict[int, tuple[int, bytes]] = {}  # offset -> length and digest of a piece
        self._tiny: dict[int, bytes] = {}  # offset -> a piece too small for that
        self._chunk = memoryview(bytearray(CHUNK))  # once: new memory costs as much as hashing
        self._filled = 0
        self._written = self._begun = 0

    def write(self, data: Any) -> int:
        """Write all of ``data`` (bytes-like); returns how many bytes."""
        give_way()
        try:
            if type(data) is not memoryview or data.format != "B" or data.ndim != 1:
                data = memoryview(data).cast("B")
            length = len(data)
            end = self._filled + length
            if not self._ready or end > CHUNK:
                return self._take(data)
            if length < _TINY:  # nearly all calls, as each tensor comes with several headers
                self._chunk[self._filled : end] = self._tiny[self.size] = bytes(data)
            else:
                piece = self._chunk[self._filled : end]
                piece[:] = data
                self._digests[self.size] = (length, _digest_of(piece))
            self._filled = end
            self.size += length
            return length
        except BaseException as error:
            self._fail(error)
            raise

    def flush(self) -> None:
        """Hand what is gathered to the system."""
        try:
            self._flush()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._ready = False

    def tiny(self, start: int) -> bytes:
        """The piece that was written there if it was a tiny one, such as a header; else nothing."""
        return self._tiny.get(start, b"")

    def digest(self, start: int, size: int) -> bytes | None:
        """The digest of the bytes that were written there in one piece or part; None if it was otherwise."""
        if len(self._tiny.get(start, b"")) == size > 0:
            return _digest_of(self._tiny[start])
        length, digest = self._digests.get(start, (0, b""))
        return digest if length == size > 0 else None

    def _take(self, data: memoryview) -> int:
        """What comes first, or does not fit into the chunk."""
        if not self._ready:
            self._begin()
        for start in range(0, len(data), PART):
            part = data[start : start + PART]
            self._digests[self.size + start] = (len(part), self._copied(part))
        self.size += len(data)
        return len(data)

    def _begin(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._before is not None:
            before, self._before = self._before, None
            before()
        self._ready = True

    def _copied(self, part: memoryview) -> bytes:
        """Copy to the chunk, piece by piece, and hash the copy; a full chunk is written."""
        digest, at = xxhash.xxh3_128(), 0
        while at < len(part):
            if self._filled == CHUNK:
                self._flush()
            room = min(CHUNK - self._filled, len(part) - at)
            piece = self._chunk[self._filled : self._filled + room]
            piece[:] = part[at : at + room]
            digest.update(piece)
            at, self._filled = at + room, self._filled + room
        return digest.digest()

    def _flush(self) -> None:
        gathered, self._filled = self._chunk[: self._filled], 0
        self._written += len(gathered)
        while len(gathered):
            gathered = gathered[os.write(self._fd, gathered) :]
        if self._written - self._begun >= _AHEAD:
            _begin_writing(self._fd, self._begun, self._written - self._begun)
            self._begun = self._written


def _begin_writing(fd: int, start: int, size: int) -> None:
    """Let the disk begin with these bytes while the next ones are copied, so that the flush at the end is short.

    It is a hint (Linux has it, other systems need none): the flush waits for all, and reports what failed.
    """
    sync_file_range = getattr(_LIBC, "sync_file_range", None)
    if sync_file_range is not None:
        sync_file_range(ctypes.c_int(fd), ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(2))
