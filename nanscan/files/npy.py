"""NumPy's files: `.npy`, and `.npz`, a zip of them. Arrays of objects are pickles and are read as such."""

from __future__ import annotations

import ast
import warnings
from typing import Any

import numpy as np

from nanscan.errors import CorruptCheckpoint
from nanscan.files.arrays import Found, array_entries
from nanscan.files.entry import Contents
from nanscan.files.source import Part, Source, read_bytes
from nanscan.files.torch_legacy import read_pickle
from nanscan.files.torch_zip import ZipMembers

__all__ = ["NPY_MAGIC", "read_npy", "read_npz"]

NPY_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 1 << 16


def read_npy(source: Source, name: str = "array") -> Contents:
    """The array of an `.npy` file.

    Raises:
        CorruptCheckpoint: it is damaged.
    """
    contents = Contents("npy", [], held=source.size)
    _add(contents, source, name)
    return contents


def read_npz(zipped: ZipMembers) -> Contents:
    """The arrays of an `.npz` file, named as `numpy.load` names them.

    Raises:
        CorruptCheckpoint: it is damaged.
    """
    contents = Contents("npz", [], held=zipped.held)
    for member in zipped.members:
        if member.endswith(".npy"):
            _add(contents, zipped.source(member), member.removesuffix(".npy"))
    return contents


def _add(contents: Contents, source: Source, name: str) -> None:
    found, notes = _array(source, name)
    contents.notes += notes
    for item in found:
        item.entry.names = item.entry.names or [name + item.suffix]
        contents.entries.append(item.entry)


def _array(source: Source, name: str) -> tuple[list[Found], list[str]]:
    dtype, shape, fortran, offset = _header(source, name)
    if dtype.hasobject:
        packed = read_pickle(Part(source, offset, source.size - offset), name)
        return [Found("", entry) for entry in packed.entries], packed.notes
    return array_entries(source, dtype, shape, fortran=fortran, offset=offset), []


def _header(source: Source, name: str) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    start = bytes(read_bytes(source, 0, min(12, source.size)))
    if start[:6] != NPY_MAGIC or len(start) < 12 or not 1 <= start[6] <= 3:
        raise CorruptCheckpoint(f"array '{name}' does not begin as an .npy file does")
    width = 2 if start[6] == 1 else 4
    size = int.from_bytes(start[8 : 8 + width], "little")
    if size > _MAX_HEADER:
        raise CorruptCheckpoint(f"array '{name}' has a header of {size} bytes")
    text = bytes(read_bytes(source, 8 + width, size))
    try:
        header = ast.literal_eval(text.decode("utf-8" if start[6] == 3 else "latin-1").strip())
        shape, fortran = header["shape"], bool(header["fortran_order"])
        if not isinstance(shape, tuple) or not all(type(n) is int for n in shape):
            raise ValueError("its shape is no tuple of sizes")
        return _dtype(header["descr"]), shape, fortran, 8 + width + size
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError, AttributeError) as error:
        raise CorruptCheckpoint(f"array '{name}' has a header that cannot be read: {error}"[:300]) from error


def _dtype(descr: Any) -> np.dtype[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.lib.format.descr_to_dtype(descr)
