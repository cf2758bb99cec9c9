"""Safetensors files: a flat dict of tensors, with a digest of each and of the header in the file's metadata.

Nested dicts are flattened with dots, and come back flat. Tensors that are the same memory are stored once; the others'
names are in the metadata (``nanscan.tied``), and `nanscan.load` gives them back as one tensor. The digests are in
``nanscan.digests``; ``nanscan.seal`` is the digest of the header itself with the seal written as zeros.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from nanscan.checkpoint import plain
from nanscan.checkpoint.digest import Region, check_regions
from nanscan.checkpoint.tensors import Found
from nanscan.errors import CorruptCheckpoint

__all__ = ["FORMAT"]

_NAMES = {"float64", "float32", "float16", "bfloat16", "complex64", "bool"}
_NAMES |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_NAMES |= {f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")}
_DTYPES = frozenset(getattr(torch, name) for name in _NAMES if hasattr(torch, name))
_SEAL = b'"nanscan.seal":"'
_ZEROS = b"0" * 32
_ADVICE = "Use an older checkpoint or another copy of this one"


class SafetensorsFormat:
    """See `nanscan.checkpoint.formats.Format`."""

    holds_paddle = False

    def prepare(self, obj: Any, path: str) -> Sequence[Found]:
        plain.import_optional("safetensors.torch", "safetensors", path)
        plain.refuse(path, _problems(obj))
        return ()

    def write(self, obj: Any, temporary: str) -> None:
        library: Any = plain.import_optional("safetensors.torch", "safetensors", temporary)
        tensors, tied = _unique({_flat(keys): value for keys, value in plain.leaves(obj)})
        digests = {name: xxhash.xxh3_128_hexdigest(plain.bytes_of(tensor)) for name, tensor in tensors.items()}
        notes = {"format": "pt", "nanscan.digests": json.dumps(digests), "nanscan.seal": _ZEROS.decode()}
        if tied:
            notes["nanscan.tied"] = json.dumps(tied)
        try:
            library.save_file(tensors, temporary, notes)
        except Exception as error:
            raise plain.system_error(error) or error from error
        _seal(temporary)

    def check(self, fd: int, path: str) -> None:
        header = _header(fd, path)
        regions = _regions(header, os.fstat(fd).st_size, path) if _has_seal(header, path) else []
        check_regions(fd, path, regions)

    def read(self, path: str, fd: int, map_location: Any, verify: bool, weights_only: bool) -> Any:
        library: Any = plain.import_optional("safetensors.torch", "safetensors", path)
        device = plain.device_of(map_location, path)
        if verify:
            self.check(fd, path)
        try:
            loaded = library.load_file(path, device=str(device))
        except Exception as error:
            raise CorruptCheckpoint(
                f"{path!r} is no safetensors file, or a damaged one: {error}. {_ADVICE}."
            ) from error
        for name, first in json.loads(_notes(_header(fd, path), path).get("nanscan.tied", "{}")).items():
            loaded[name] = loaded[first]
        return loaded


def _problems(obj: Any) -> list[Any]:
    if not isinstance(obj, dict):
        return [
            plain.refusal(
                (),
                obj,
                "a safetensors file holds a dict of tensors",
                "save its state_dict() or another dict, or as .pt",
            )
        ]
    found, seen = [], set()
    for keys, value in plain.leaves(obj):
        reason = _reason(keys, value)
        if reason is None and _flat(keys) in seen:
            reason = f"two tensors would be called {_flat(keys)!r} once dicts are flattened", "rename one"
        seen.add(_flat(keys))
        if reason:
            found.append(plain.refusal(keys, value, *reason))
    return found


def _reason(keys: tuple[Any, ...], value: Any) -> tuple[str, str] | None:
    if not all(isinstance(key, str) for key in keys):
        return "names in a safetensors file are strings", "use str(key)"
    if not isinstance(value, Tensor):
        return "a safetensors file holds tensors only", "use torch.tensor(x) for a number"
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return "a safetensors file holds dense tensors with data only", "use x.to_dense() or x.dequantize()"
    if value.dtype not in _DTYPES:
        return f"a safetensors file has no dtype {value.dtype}", "convert it, or save its parts"
    if keys == ("__metadata__",):
        return "this name is reserved", "rename it"
    return None


def _flat(keys: tuple[Any, ...]) -> str:
    return ".".join(str(key) for key in keys)


def _unique(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, as own contiguous memory; and name -> first name of those that are the same."""
    first: dict[Hashable, str] = {}
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        key = (
            (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        )
        if first.setdefault(key, name) != name:
            tied[name] = first[key]
            continue
        plain_tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        whole = plain_tensor.untyped_storage().nbytes() == plain_tensor.nbytes
        kept[name] = plain_tensor if whole else plain_tensor.clone()
    return kept, tied


def _header(fd: int, path: str) -> bytes:
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 10 or length > size - 8:
        raise CorruptCheckpoint(f"{path!r} is no safetensors file, or is cut off within its header. {_ADVICE}.")
    return os.pread(fd, 8 + length, 0)


def _seal(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        header = _header(fd, path)
        at = header.index(_SEAL + _ZEROS) + len(_SEAL)
        os.pwrite(fd, xxhash.xxh3_128_hexdigest(header).encode(), at)
    finally:
        os.close(fd)


def _has_seal(header: bytes, path: str) -> bool:
    """True if the header is the one that was saved; False if it was made by something else."""
    at = header.find(_SEAL)
    if at < 0 and b"nanscan." not in header:
        return False
    at += len(_SEAL)
    zeroed = header[:at] + _ZEROS + header[at + 32 :]
    if at < len(_SEAL) or xxhash.xxh3_128_hexdigest(zeroed).encode() != header[at : at + 32]:
        raise CorruptCheckpoint(f"{path!r} is corrupt: its header is not what was saved. {_ADVICE}.")
    return True


def _entries(header: bytes, path: str) -> dict[str, Any]:
    try:
        found = json.loads(header[8:])
    except ValueError as error:
        raise CorruptCheckpoint(f"{path!r} is no safetensors file: its header is no JSON ({error}).") from None
    return found if isinstance(found, dict) else {}


def _notes(header: bytes, path: str) -> dict[str, str]:
    notes = _entries(header, path).get("__metadata__")
    return notes if isinstance(notes, dict) else {}


def _regions(header: bytes, size: int, path: str) -> list[Region]:
    """The tensors' bytes; they fill the file."""
    entries, digests = _entries(header, path), json.loads(_notes(header, path)["nanscan.digests"])
    offsets = {name: entries[name]["data_offsets"] for name in digests}
    end = len(header) + max((stop for _, stop in offsets.values()), default=0)
    if end != size:
        what = f"{end - size:,} bytes are missing" if size < end else f"{size - end:,} bytes follow"
        raise CorruptCheckpoint(f"{path!r} is corrupt: {what} at its end. {_ADVICE}.")
    return [
        plain.tensor_region(name, len(header) + start, stop - start, digests[name])
        for name, (start, stop) in offsets.items()
    ]


FORMAT = SafetensorsFormat()
