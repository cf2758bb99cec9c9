"""`.safetensors`: a JSON header and the tensors' bytes.

Read without the library of that name, which maps the file and copies whole tensors: here a block at a time is held.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from nanscan.errors import CorruptCheckpoint
from nanscan.files.elements import Element, of_torch
from nanscan.files.entry import Contents, Entry
from nanscan.files.layout import row_major
from nanscan.files.source import Part, Source, read_bytes

__all__ = ["looks_like_safetensors", "read_safetensors"]

_MAX_HEADER = 100_000_000  # the library's own limit
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "C64": "complex64", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # packed, without NaN or Inf


def looks_like_safetensors(start: bytes, size: int) -> bool:
    """Whether a file that begins with ``start`` is such a one."""
    return len(start) >= 9 and start[8:9] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= min(size, _MAX_HEADER)


def read_safetensors(source: Source) -> Contents:
    """The tensors of a `.safetensors` file.

    Raises:
        CorruptCheckpoint: it is damaged: as the library, it wants every byte to belong to exactly one tensor.
    """
    if source.size < 8:
        raise CorruptCheckpoint("it is too short for the length of its header")
    size = int.from_bytes(read_bytes(source, 0, 8), "little")
    if size > min(_MAX_HEADER, source.size - 8):
        raise CorruptCheckpoint(f"its header claims {size} bytes of a file of {source.size}: it is cut off or damaged")
    header = _parsed(bytes(read_bytes(source, 8, size)))
    data = Part(source, 8 + size, source.size - 8 - size)
    tied = _tied(header.pop("__metadata__", None))
    placed = sorted((_place(name, item), name) for name, item in header.items())
    _check_tiling(placed, data.size)
    entries = [_entry(name, header[name], data) for _, name in placed]
    for entry in entries:
        entry.names += [name for name, first in tied.items() if first == entry.names[0]]
    return Contents("safetensors", entries, held=data.size)


def _tied(notes: Any) -> dict[str, str]:
    """Other names of tensors that nanscan.save found tied -> the name under which they are stored."""
    try:
        tied = json.loads(notes["nanscan.tied"])
        return {name[:1000]: first for name, first in list(tied.items())[:1000] if isinstance(first, str)}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}


def _parsed(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name occurs twice")
        return result

    if re.match(rb"(?s).{0,100000}?[\[{]{200}", text):
        raise CorruptCheckpoint("its header is nested too deep")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CorruptCheckpoint(f"its header is not valid JSON: {error}"[:300]) from error
    if not isinstance(header, dict):
        raise CorruptCheckpoint("its header is no JSON object")
    return header


def _place(name: str, item: Any) -> tuple[int, int]:
    offsets = item.get("data_offsets") if isinstance(item, dict) else None
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets)):
        raise CorruptCheckpoint(f"tensor '{name[:200]}' has no data_offsets")
    return offsets[0], offsets[1]


def _check_tiling(placed: list[tuple[tuple[int, int], str]], size: int) -> None:
    at = 0
    for (start, end), name in placed:
        if start != at or end < start:
            raise CorruptCheckpoint(f"tensor '{name[:200]}' lies at bytes {start} to {end}, where {at} should follow")
        at = end
    if at != size:
        kind = "cut off" if at > size else "followed by other bytes"
        raise CorruptCheckpoint(f"its header places {at} bytes, but {size} follow it: it is {kind}")


def _entry(name: str, item: dict[str, Any], data: Source) -> Entry:
    (start, end), shape = _place(name, item), item.get("shape")
    if not (isinstance(shape, list) and all(type(n) is int for n in shape)):
        raise CorruptCheckpoint(f"tensor '{name[:200]}' has no shape")
    kind = item.get("dtype")
    if kind in _BITS:
        element = Element(str(kind), 1, None, False)
        return Entry([name], tuple(shape), element, unread=f"{kind} is packed and holds no NaN or Inf")
    if not isinstance(kind, str) or not hasattr(torch, _DTYPES.get(kind, "?")):
        raise CorruptCheckpoint(f"tensor '{name[:200]}' has the unknown type {str(kind)[:40]!r}")
    element = of_torch(getattr(torch, _DTYPES[kind]))
    view = row_major(tuple(shape), element.itemsize, start)
    if view.numel * element.itemsize != end - start:
        raise CorruptCheckpoint(f"tensor '{name[:200]}' of shape {shape} does not fill its {end - start} bytes")
    return Entry([name], tuple(shape), element, data, view)
