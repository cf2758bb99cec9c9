"""The file that torch.save writes into: digests of what is written, and the system's own error if that fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import xxhash

__all__ = ["PART", "DigestingWriter"]

PART = 16 << 20  # a longer piece gets a digest for each so many bytes, so that several threads can compare them
_CHUNK = 1 << 20  # bytes copied at a time: they stay in the cache between copying, hashing and writing
_SMALL = 256 << 10  # pieces below this are gathered, so that many small tensors don't cost a system call each
_TINY = 512  # pieces below this (headers, padding) are kept as they are


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
        self._digests: dict[int, tuple[int, bytes]] = {}  # offset -> length and digest of a piece
        self._tiny: dict[int, bytes] = {}  # offset -> a piece too small for that
        self._gathered = bytearray()
        self._hashing: ThreadPoolExecutor | None = None
        self._chunks = memoryview(b""), memoryview(b"")  # made with the thread: new memory costs as much as hashing

    def write(self, data: Any) -> int:
        """Write all of ``data`` (bytes-like); returns how many bytes."""
        try:
            return self._take(memoryview(data).cast("B"))
        except BaseException as error:
            self.failure = self.failure or error
            raise

    def flush(self) -> None:
        """Hand what is gathered to the system."""
        try:
            self._flush()
        except BaseException as error:
            self.failure = self.failure or error
            raise

    def close(self) -> None:
        """End the thread that hashes; the file stays open."""
        if self._hashing is not None:
            self._hashing.shutdown()

    def digest(self, start: int, size: int) -> bytes | None:
        """The digest of the bytes that were written there in one piece or part; None if it was otherwise."""
        if len(self._tiny.get(start, b"")) == size > 0:
            return xxhash.xxh3_128_digest(self._tiny[start])
        length, digest = self._digests.get(start, (0, b""))
        return digest if length == size > 0 else None

    def _take(self, data: memoryview) -> int:
        if self.failure is not None:
            raise self.failure
        if self._before is not None:
            before, self._before = self._before, None
            before()
        length = len(data)
        if length < _SMALL:
            self._gather(bytes(data))
        else:
            self._write_large(data)
        self.size += length
        return length

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        _write_all(self._fd, memoryview(gathered))

    def _gather(self, data: bytes) -> None:
        self._gathered += data
        if len(self._gathered) >= _CHUNK:
            self._flush()
        if len(data) < _TINY:
            self._tiny[self.size] = data
        else:
            self._digests[self.size] = (len(data), xxhash.xxh3_128_digest(data))

    def _write_large(self, data: memoryview) -> None:
        self._flush()
        if self._hashing is None:
            self._hashing = ThreadPoolExecutor(1, "nanscan-digest")
            self._chunks = memoryview(bytearray(_CHUNK)), memoryview(bytearray(_CHUNK))
        for start in range(0, len(data), PART):
            part = data[start : start + PART]
            self._digests[self.size + start] = (len(part), self._write_part(part, self._hashing))

    def _write_part(self, part: memoryview, hashing: ThreadPoolExecutor) -> bytes:
        """Copy, hash and write; a chunk is hashed in another thread while the system takes it."""
        digest = xxhash.xxh3_128()
        last: Future[None] | None = None
        for number, start in enumerate(range(0, len(part), _CHUNK)):
            piece = part[start : start + _CHUNK]
            chunk = self._chunks[number % 2][: len(piece)]
            chunk[:] = piece
            if last is not None:
                last.result()  # so the other chunk is free again
            try:
                last = hashing.submit(digest.update, chunk)
            except RuntimeError:  # the interpreter is ending (a save at exit) and starts no threads any more
                last = None
                digest.update(chunk)
            _write_all(self._fd, chunk)
        if last is not None:
            last.result()
        return digest.digest()


def _write_all(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]
