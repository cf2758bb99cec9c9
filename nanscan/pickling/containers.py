"""Finds the pickles in a file: bare, several in a row, in a torch zip archive, in torch's older formats."""

from __future__ import annotations

import functools
import io
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from typing import IO

import torch

from nanscan.foreign_files import kind_by_head, kind_by_members
from nanscan.pickling.opcodes import Global, Trace, follow

__all__ = ["NotAPickle", "Part", "item_size", "kind_of", "parts_of"]

Part = tuple[str, Trace]  # where in the file, what it does
_MAGIC = 0x1950A86A20F9469CFC6C  # torch.serialization.MAGIC_NUMBER
_LEGACY = ("magic number", "protocol version", "system information", "object", "storage keys")
_NO_PICKLES = {
    b"\x89HDF": "an HDF5 file, which holds no pickle",
    b"\x93NUMPY": "a NumPy array file; nanscan scan reads it",
    b"<": "text (HTML or XML: an error page in place of the download?)",
}


class NotAPickle(ValueError):
    """The file holds no pickle; the message says what it is instead, as far as one can tell."""


def kind_of(stream: IO[bytes]) -> str:
    """`torch zip archive`, `torch tar file` or `pickle`, by the beginning, as torch.load decides it.

    Raises:
        NotAPickle: it is empty, or clearly something else.
    """
    stream.seek(0)
    head = stream.read(64)
    stream.seek(0)
    if not head:
        raise NotAPickle("the file is empty")
    if head.startswith(b"PK\x03\x04"):
        return "torch zip archive"
    what = kind_by_head(head) or next((what for magic, what in _NO_PICKLES.items() if head.startswith(magic)), None)
    if what:
        raise NotAPickle(f"it is {what}")
    if head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] < 1 << 40:
        raise NotAPickle("it is a safetensors file, which holds no pickle")
    if not any(head):
        return "pickle"  # it is none either; an archive that begins with its end mark would pass as a tar file
    try:
        tarfile.open(fileobj=stream, mode="r:").close()
        return "torch tar file"
    except (tarfile.TarError, EOFError, ValueError):
        return "pickle"
    finally:
        stream.seek(0)


def parts_of(stream: IO[bytes], kind: str) -> Iterator[Part]:
    """Every pickle of the file, with the name of its place; the last one carries the error that ended it."""
    if kind == "torch zip archive":
        yield from _of_zip(stream)
    elif kind == "torch tar file":
        yield from _of_tar(stream)
    else:
        yield from _of_stream(stream)


def _of_zip(stream: IO[bytes]) -> Iterator[Part]:
    try:
        archive = zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        yield "archive", Trace(error=f"the zip archive is truncated or damaged: {error}")
        return
    names = [name for name in archive.namelist() if name.rpartition("/")[2].endswith(".pkl")]
    if not names:
        raise NotAPickle(f"it is {kind_by_members(archive.namelist()) or 'a zip archive without a data.pkl'}")
    for name in names:
        try:
            with archive.open(name) as entry:
                content = io.BytesIO(entry.read())
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError, EOFError, ValueError) as error:
            yield name, Trace(error=f"this entry is damaged or can't be read: {error}")
            continue
        yield from _row(content, name)


def _row(stream: IO[bytes], place: str) -> Iterator[Part]:
    """Pickles one after the other to the end of the stream."""
    size, count = stream.seek(0, io.SEEK_END), 0
    stream.seek(0)
    while count == 0 or stream.tell() < size:
        trace = follow(stream)
        yield f"{place}[{count}]" if count else place, trace
        if trace.error:
            return
        count += 1


def _of_stream(stream: IO[bytes]) -> Iterator[Part]:
    first = follow(stream)
    if first.value != _MAGIC:
        stream.seek(0)
        yield from _row(stream, "pickle")
        return
    yield _LEGACY[0], first
    for place in _LEGACY[1:]:  # the tensors' data follows, and is no pickle
        trace = follow(stream)
        yield place, trace
        if trace.error:
            return


def _of_tar(stream: IO[bytes]) -> Iterator[Part]:
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        names = archive.getnames()
        if "pickle" not in names:
            raise NotAPickle("it is a tar archive, but not one that torch has written (no member 'pickle')")
        for name in names:
            member = archive.extractfile(name) if archive.getmember(name).isfile() else None
            if member is None:
                continue
            yield from (
                _storages(member)
                if name == "storages"
                else _tensors(member)
                if name == "tensors"
                else _row(member, name)
            )


def _storages(stream: IO[bytes]) -> Iterator[Part]:
    """A count, then for each storage a pickle (key, location, type) and its data, which is skipped."""
    count = follow(stream)
    yield "storages", count
    for index in range(count.value if isinstance(count.value, int) else 0):
        trace = follow(stream)
        yield f"storages[{index}]", trace
        kind = trace.value[2] if isinstance(trace.value, tuple) and len(trace.value) == 3 else None
        data = stream.read(8)
        if trace.error or not isinstance(kind, Global) or len(data) < 8:
            return
        stream.seek(struct.unpack("<q", data)[0] * item_size(kind.name), io.SEEK_CUR)


def _tensors(stream: IO[bytes]) -> Iterator[Part]:
    """A count, then for each tensor a pickle and its sizes, strides and offset, which are skipped."""
    count = follow(stream)
    yield "tensors", count
    for index in range(count.value if isinstance(count.value, int) else 0):
        trace = follow(stream)
        yield f"tensors[{index}]", trace
        data = stream.read(8)
        if trace.error or len(data) < 8:
            return
        stream.seek(struct.unpack("<i", data[:4])[0] * 16 + 8, io.SEEK_CUR)


@functools.lru_cache(maxsize=1)
def _item_sizes() -> dict[str, int]:
    return {name: dtype.itemsize for dtype, name in torch.storage._dtype_to_storage_type_map().items()}


def item_size(storage: str) -> int:
    """Bytes per element of a torch storage class, by its name; 1 for an unknown one.

    >>> item_size("FloatStorage"), item_size("UntypedStorage")
    (4, 1)
    """
    return _item_sizes().get(storage, 1)
