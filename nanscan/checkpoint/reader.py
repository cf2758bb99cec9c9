"""The file that torch.load reads from: each tensor's bytes are compared with their digest as they are read."""

from __future__ import annotations

import io
import os
from typing import Any

import xxhash

from nanscan.checkpoint.digest import Region, Seal, corrupt_regions
from nanscan.errors import CorruptCheckpoint

__all__ = ["VerifyingReader"]

_CHUNK = 1 << 20


class VerifyingReader(io.RawIOBase):
    """A file over ``fd`` whose members are hashed while they are in the cache anyway, so that they are read once.

    Attributes:
        unread: members that were not read as a whole, and so were not compared.
        failure: the error for the first damaged member; torch may turn the exception into another one.
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
        view = memoryview(buffer).cast("B")
        region = self.unread.get(self._at)
        if region is None or region.size != len(view):
            got = os.preadv(self._fd, [view], self._at)
        else:
            got = self._read_member(view, region)
        self._at += got
        return got

    def _read_member(self, view: memoryview, region: Region) -> int:
        digest, got = xxhash.xxh3_128(), 0
        while got < len(view):
            part = view[got : got + _CHUNK]
            count = os.preadv(self._fd, [part], region.start + got)
            if count == 0:
                break
            digest.update(part[:count])
            got += count
        del self.unread[region.start]
        if digest.hexdigest() != region.digest:
            self.failure = corrupt_regions(self._path, [region])
            raise self.failure
        return got
