"""HDF5 files (`.h5`), read by h5py in a process of its own, whose crash or hang is an error here."""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from nanscan.errors import CorruptCheckpoint
from nanscan.files import hdf5_child
from nanscan.files.arrays import Found, array_entries, ml_dtype
from nanscan.files.entry import Contents, Entry
from nanscan.files.layout import View
from nanscan.files.source import UnreadableFile

__all__ = ["HDF5_MAGIC", "hdf5_damage", "read_hdf5"]

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_USER_BLOCK = 512
_MARK = b"nanscan xxh3_128 "  # how nanscan.save begins it
_PATIENCE = 60.0  # seconds without a byte
_MAX_LIST = 1 << 28


class _Child:
    """The reading process; restarted when a dataset is to be read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> list[dict[str, Any]]:
        """The list of datasets."""
        command = [sys.executable, str(Path(hdf5_child.__file__)), str(self._path)]
        environment = {**os.environ, "HDF5_PLUGIN_PATH": os.devnull, "HDF5_USE_FILE_LOCKING": "FALSE"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=environment
        )
        weakref.finalize(self, _end, self._process)
        rows = json.loads(self._line())
        return list(rows)

    def ask(self, request: str) -> None:
        if self._process is None:
            self.start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(f"{request}\n".encode())
        except BrokenPipeError:
            self._failed()

    def stop(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None

    def readinto(self, into: memoryview) -> int:
        """At least one byte, or an error."""
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(_PATIENCE):
                self.stop()
                raise CorruptCheckpoint(f"the HDF5 library hangs on it (nothing for {_PATIENCE:.0f} s)")
        count = self._process.stdout.readinto(into)  # type: ignore[attr-defined]
        return int(count) or self._failed()

    def _line(self) -> bytes:
        piece = memoryview(bytearray(1 << 16))
        line = bytearray()
        while not line.endswith(b"\n"):
            line += piece[: self.readinto(piece)]
            if len(line) > _MAX_LIST:
                raise CorruptCheckpoint("its list of datasets is longer than 256 MiB")
        return bytes(line)

    def _failed(self) -> int:
        assert self._process is not None and self._process.stderr is not None
        said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        code = self._process.wait()
        self.stop()
        if code < 0:
            raise CorruptCheckpoint(f"the HDF5 library crashed on it (signal {-code}): it is damaged")
        raise CorruptCheckpoint(f"the HDF5 library cannot read it: {said[-1] if said else f'exit code {code}'}"[:400])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


class _Dataset:
    """A dataset's bytes in row-major order, streamed front to back."""

    def __init__(self, child: _Child, request: str, size: int) -> None:
        self._child = child
        self._request = request
        self.size = size
        self._at: int | None = None

    def readinto(self, start: int, into: memoryview) -> None:
        if start < 0 or start + len(into) > self.size:
            raise CorruptCheckpoint(f"bytes {start} to {start + len(into)} are asked for, but there are {self.size}")
        if self._at != start:
            self._open(start)
        self._fill(into)

    def _open(self, start: int) -> None:
        if self._at not in (None, self.size):
            self._child.stop()  # what is left of the last answer is given up
        self._child.ask(self._request)
        self._at = 0
        while self._at < start:
            self._fill(memoryview(bytearray(min(1 << 20, start - self._at))))

    def _fill(self, into: memoryview) -> None:
        assert self._at is not None
        done = 0
        while done < len(into):
            done += self._child.readinto(into[done:])
        self._at += done


def hdf5_damage(path: Path) -> str | None:
    """What the digest in a file of nanscan.save says against it; the HDF5 library is not asked."""
    from nanscan.checkpoint.digest import digest_range

    with open(path, "rb", buffering=0) as file:
        block, size = file.read(_USER_BLOCK), file.seek(0, os.SEEK_END)
        if not block.startswith(_MARK):
            return None
        saved = block[len(_MARK) :].rstrip(b"\0").decode("latin-1").split(" ")
        found = [f"{size:016x}", digest_range(file.fileno(), _USER_BLOCK, max(0, size - _USER_BLOCK)).hex()]
    return None if saved == found else "its bytes differ from the digest that nanscan.save put into it"


def read_hdf5(path: Path) -> Contents:
    """The datasets of an HDF5 file, by their paths in it; links to other files are not followed.

    Raises:
        UnreadableFile: h5py is not installed.
        CorruptCheckpoint: the file is damaged.
    """
    if importlib.util.find_spec("h5py") is None:
        raise UnreadableFile("it is an HDF5 file, and reading those needs h5py: pip install 'nanscan[hdf5]'")
    child = _Child(path)
    contents = Contents("hdf5", [], held=path.stat().st_size, close=child.stop)
    for number, row in enumerate(child.start()):
        for found in _found(child, number, row, contents.notes):
            found.entry.names = [str(row["name"]).lstrip("/") + found.suffix]
            contents.entries.append(found.entry)
            contents.held += found.entry.stored
    return contents


def _found(child: _Child, number: int, row: dict[str, Any], notes: list[str]) -> list[Found]:
    shape, why = tuple(row["shape"]), row["why"]
    if row["dtype"] is None or why:
        if why != "no numbers":
            notes.append(f"'{row['name']}' was not read: {why}")
        element = array_entries(_Dataset(child, "", 0), np.dtype("V1"), (0,))[0].entry.element
        return [Found("", Entry([], shape, element, unread=why))]
    dtype = np.lib.format.descr_to_dtype(_descr(row["dtype"]))
    kind = ml_dtype(row.get("attributes", {}).get("dtype", "").removeprefix("torch.")) or dtype
    if kind.itemsize != dtype.itemsize:
        kind = dtype
    if not row["fill"]:
        size = dtype.itemsize * int(np.prod(shape, dtype=object))
        return array_entries(_Dataset(child, str(number), size), kind, shape)
    one = array_entries(_Dataset(child, f"{number}f", dtype.itemsize), kind, ())
    return [Found(item.suffix, _expanded(item.entry, shape)) for item in one]


def _expanded(entry: Entry, shape: tuple[int, ...]) -> Entry:
    """A dataset that was never written: every element is its fill value."""
    view = entry.view
    if view is None:
        return entry
    entry.shape = (*shape, *view.shape)
    entry.view = View(entry.shape, (*(0 for _ in shape), *view.strides), view.offset, view.itemsize)
    return entry


def _descr(listed: Any) -> Any:
    """A dtype's description after JSON has made lists of its tuples."""
    if isinstance(listed, str):
        return listed
    return [tuple(_descr(part) if i == 1 else _field(part) for i, part in enumerate(field)) for field in listed]


def _field(part: Any) -> Any:
    return tuple(part) if isinstance(part, list) else part
