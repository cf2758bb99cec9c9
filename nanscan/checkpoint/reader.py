"""The file that torch.load reads from: each tensor's bytes are compared with their digest as they are read."""

from __future__ import annotations

import io
import os
from typing import Any

import xxhash

from nanscan.checkpoint.digest import Region, Seal, corrupt_regions
from nanscan.checkpoint.writer import CHUNK
from nanscan.errors import CorruptCheckpoint

__all__ = ["VerifyingReader"]


class VerifyingReader(io.RawIOBase):
    """A file over ``fd`` whose members are hashed while they are in the cache anyway, so that they are read once.

    Attributes:
        unread: parts of members that were not read with their whole member, and so were not compared; by position.
        failure: the error for the first damaged member. It is kept here and not raised: torch calls from C++, where an
            exception can become another one or, from Python 3.13 on, get lost in a garbage collection.
    """

    def __init__(self, fd: int, path: str, seal: Seal) -> None:
        self.failure: CorruptCheckpoint | None = None
        self.unread = {region.start: region for region in seal.regions}
        self._fd = fd
        self._path = path
        self._at = 0
        self._size = os.fstat(fd).st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read into ``buffer`` until it is full or the file ends."""
        view, got = memoryview(buffer).cast("B"), 0
        while got < len(view):
            region = self.unread.get(self._at + got)
            whole = region is not None and region.size <= len(view) - got
            count = self._read_region(view[got:], region) if whole and region else self._read(view[got:], got)
            if count == 0:
                break
            got += count
        self._at += got
        return got

    def _read(self, view: memoryview, after: int) -> int:
        return os.preadv(self._fd, [view], self._at + after)

    def _read_region(self, view: memoryview, region: Region) -> int:
        """Read one region to the start of ``view`` and compare it."""
        digest, got = xxhash.xxh3_128(), 0
        while got < region.size:
            part = view[got : min(got + CHUNK, region.size)]
            count = os.preadv(self._fd, [part], region.start + got)
            if count == 0:
                break
            digest.update(part[:count])
            got += count
        del self.unread[region.start]
        if digest.hexdigest() != region.digest and self.failure is None:
            self.failure = corrupt_regions(self._path, [region])
        return got
