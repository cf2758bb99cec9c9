"""Where things are in a zip archive as torch.save writes it, and how one more member is put at its end."""

from __future__ import annotations

import os
import struct
import zlib
from typing import NamedTuple

__all__ = [
    "Directory",
    "Member",
    "NotAnArchive",
    "data_start",
    "end_of",
    "local_size",
    "members_of",
    "read_directory",
    "tail_with",
]

_END = struct.Struct("<4s4H2LH")  # end of the central directory
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX32 = 0xFFFFFFFF
_LONGEST_END = _END.size + 0xFFFF


class NotAnArchive(Exception):
    """The reason why a file is no zip archive, or not a whole one."""


class Member(NamedTuple):
    """One member: its name, where its local header starts, its size in bytes."""

    name: str
    header: int
    size: int
    stored: bool


class Directory(NamedTuple):
    """The central directory: where it starts, its bytes, and the number of its entries."""

    start: int
    raw: bytes
    entries: int


def end_of(fd: int, size: int) -> tuple[int, bytes]:
    """Position and bytes of the end record, its comment included."""
    length = min(size, _LONGEST_END)
    tail = os.pread(fd, length, size - length)
    at = tail.rfind(b"PK\5\6")
    if at < 0:
        raise NotAnArchive("the end of the archive is missing (a truncated or torn file)")
    return size - length + at, tail[at:]


def read_directory(fd: int, size: int) -> Directory:
    """The central directory of the archive of ``size`` bytes."""
    at, end = end_of(fd, size)
    if len(end) < _END.size:
        raise NotAnArchive("the end of the archive is cut off")
    *_, count, length, start, _ = _END.unpack(end[: _END.size])
    locator = os.pread(fd, _LOCATOR64.size, max(0, at - _LOCATOR64.size))
    if locator[:4] == b"PK\6\7":
        record = os.pread(fd, _END64.size, _LOCATOR64.unpack(locator)[2])
        if len(record) < _END64.size or record[:4] != b"PK\6\6":
            raise NotAnArchive("its end record points to a place where no directory is")
        *_, count, length, start = _END64.unpack(record)
    if start + length > size:
        raise NotAnArchive("its directory lies beyond the end of the file")
    return Directory(start, os.pread(fd, length, start), count)


def members_of(directory: Directory) -> list[Member]:
    """The members, in the order of the directory."""
    found, at, raw = [], 0, directory.raw
    for _ in range(directory.entries):
        if raw[at : at + 4] != b"PK\1\2" or at + _CENTRAL.size > len(raw):
            raise NotAnArchive("its directory is damaged")
        entry = _CENTRAL.unpack_from(raw, at)
        name_end = at + _CENTRAL.size + entry[10]
        after = name_end + entry[11] + entry[12]
        size, header = _wide(entry, raw[name_end : name_end + entry[11]])
        name = raw[at + _CENTRAL.size : name_end].decode("utf-8", "replace")
        found.append(Member(name, header, size, entry[4] == 0))
        at = after
    return found


def _wide(entry: tuple[int, ...], extra: bytes) -> tuple[int, int]:
    """Size and position of a member, from the Zip64 field where they don't fit into 32 bits."""
    stored, size, header = entry[8], entry[9], entry[16]
    if _MAX32 not in (stored, size, header):
        return size, header
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, 4))
            size = next(values, 0) if size == _MAX32 else size
            _ = next(values, 0) if stored == _MAX32 else stored
            return size, next(values, 0) if header == _MAX32 else header
        extra = extra[4 + length :]
    return size, header


def data_start(header: bytes, at: int) -> int:
    """Where the data of a member starts whose local header, at position ``at``, begins with these bytes."""
    if header[:4] != b"PK\3\4" or len(header) < _LOCAL.size:
        raise NotAnArchive(f"there is no member at byte {at:,}, where its directory says")
    *_, name, extra = _LOCAL.unpack_from(header)
    return at + _LOCAL.size + int(name) + int(extra)


def tail_with(directory: Directory, name: str, content: bytes, comment: bytes) -> bytes:
    """What replaces everything from the start of the directory on, so that the archive has one more member.

    Args:
        directory: of the archive as it is.
        name: of the new member.
        content: its bytes (below 4 GB).
        comment: of the archive.
    """
    encoded, crc = name.encode(), zlib.crc32(content)
    sizes = (crc, len(content), len(content))
    local = _LOCAL.pack(b"PK\3\4", 20, 0x800, 0, 0, 0x21, *sizes, len(encoded), 0) + encoded + content
    wide = struct.pack("<2HQ", 1, 8, directory.start)
    common = (20, 20, 0x800, 0, 0, 0x21, *sizes, len(encoded), len(wide), 0, 0, 0, 0, _MAX32)
    raw = directory.raw + _CENTRAL.pack(b"PK\1\2", *common) + encoded + wide
    return local + raw + _end(directory.start + len(local), len(raw), directory.entries + 1, comment)


def _end(start: int, length: int, count: int, comment: bytes) -> bytes:
    """The end records; those of Zip64 are always there, as torch writes them."""
    record = _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, length, start)
    locator = _LOCATOR64.pack(b"PK\6\7", 0, start + length, 1)
    few, short, near = min(count, 0xFFFF), min(length, _MAX32), min(start, _MAX32)
    return record + locator + _END.pack(b"PK\5\6", 0, 0, few, few, short, near, len(comment)) + comment


def local_size(header: bytes) -> int:
    """The size of the data of the member whose local header these bytes begin with."""
    return int(_LOCAL.unpack_from(header)[8])
