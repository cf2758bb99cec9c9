"""HDF5 files: nested dicts become groups, tensors datasets, numbers and strings attributes of their group.

What HDF5 has no type for (bfloat16, float8) is stored as unsigned integers of that size; each dataset's attribute
``dtype`` says what it is, ``xxh3_128`` is the digest of its bytes. Tied tensors are one dataset with two names. The
first 512 bytes, which HDF5 leaves to its users, hold the size of the file and the digest of all that follows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from nanscan.checkpoint import plain
from nanscan.checkpoint.digest import digest_range
from nanscan.checkpoint.tensors import Found
from nanscan.errors import CheckpointError, CorruptCheckpoint
from nanscan.names import dtype_name

__all__ = ["FORMAT"]

_BLOCK = 512
_MARK = b"nanscan xxh3_128 "
_RAW = {1: torch.uint8, 2: torch.uint16}  # bytes of an element -> what a dtype that NumPy lacks is stored as
_FOREIGN = frozenset({"bfloat16", *(name for name in dir(torch) if name.startswith("float8_"))})
_NUMPY = frozenset({"float64", "float32", "float16", "complex64", "complex128", "bool"})
_NUMPY |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_ADVICE = "Use an older checkpoint or another copy of this one"


class Hdf5Format:
    """See `nanscan.checkpoint.formats.Format`."""

    holds_paddle = False

    def prepare(self, obj: Any, path: str) -> Sequence[Found]:
        plain.import_optional("h5py", "hdf5", path)
        plain.refuse(path, _problems(obj))
        return ()

    def write(self, obj: Any, temporary: str) -> None:
        h5py: Any = plain.import_optional("h5py", "hdf5", temporary)
        try:
            with h5py.File(temporary, "w", track_order=True, driver="core", backing_store=False) as f:
                _write_group(f, obj, {})
                f.flush()
                image = f.id.get_file_image()
        except (ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"HDF5 refuses the state: {error}") from error
        _write_file(temporary, image)

    def check(self, fd: int, path: str) -> None:
        size = os.fstat(fd).st_size
        block = os.pread(fd, _BLOCK, 0)
        if not block.startswith(_MARK):
            _check_foreign(block, path)
        elif size <= _BLOCK or block != _block(size, digest_range(fd, _BLOCK, size - _BLOCK).hex()):
            raise CorruptCheckpoint(f"{path!r} is corrupt: {_damage(path)} {_ADVICE}.")

    def read(self, path: str, fd: int, map_location: Any, verify: bool, weights_only: bool) -> Any:
        h5py: Any = plain.import_optional("h5py", "hdf5", path)
        device = plain.device_of(map_location, path)
        if verify:
            self.check(fd, path)
        try:
            with h5py.File(path, "r", locking=False) as file:
                return _read_group(file, device, {})
        except CheckpointError:
            raise
        except Exception as error:
            raise CorruptCheckpoint(f"{path!r} is no HDF5 file, or a damaged one: {error}. {_ADVICE}.") from error


def _problems(obj: Any) -> list[Any]:
    if not isinstance(obj, dict):
        return [plain.refusal((), obj, "an HDF5 file holds a dict", "save its state_dict() or another dict, or as .pt")]
    judged = ((keys, value, _reason(keys, value)) for keys, value in plain.leaves(obj))
    return [plain.refusal(keys, value, *reason) for keys, value, reason in judged if reason]


def _reason(keys: tuple[Any, ...], value: Any) -> tuple[str, str] | None:
    for key in keys:
        if not isinstance(key, str) or not key or "/" in key or "\0" in key or key in (".", ".."):
            return "names in an HDF5 file are strings without '/'", "use another key"
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return "an HDF5 file holds dense tensors with data only", "use x.to_dense() or x.dequantize()"
        known = dtype_name(value.dtype) in _NUMPY | _FOREIGN
        return None if known else (f"an HDF5 file has no dtype {value.dtype}", "convert it, or save its parts")
    if type(value) is int and not -(2**63) <= value < 2**64:
        return "an integer in an HDF5 file has 64 bits", "store str(x)"
    if type(value) is str and ("\0" in value or len(value.encode("utf-8", "replace")) > 60_000):
        return "a text in an HDF5 file is shorter than 64 kB and has no null character", "save as .pt"
    if type(value) in (bool, int, float, str) or (isinstance(value, Mapping) and not value):
        return None
    return "an HDF5 file holds tensors, numbers, texts and dicts of them", "convert it, or save as .pt"


def _write_group(group: Any, state: Mapping[str, Any], known: dict[Any, Any]) -> None:
    """Write a dict; ``known``: tensors that are there already, with their datasets."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            key = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else None
            if key in known:
                group[name] = known[key]
            else:
                known[key or object()] = _write_tensor(group, name, value)
        elif isinstance(value, Mapping):
            _write_group(group.create_group(name, track_order=True), value, known)
        else:
            group.attrs[name] = value


def _write_tensor(group: Any, name: str, tensor: Tensor) -> Any:
    plain_tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    dtype = dtype_name(tensor.dtype)
    stored = plain_tensor.view(_RAW[tensor.itemsize]) if dtype in _FOREIGN else plain_tensor
    dataset = group.create_dataset(name, data=stored.numpy())
    dataset.attrs["dtype"] = dtype
    dataset.attrs["xxh3_128"] = xxhash.xxh3_128_hexdigest(plain.bytes_of(plain_tensor))
    return dataset


def _write_file(path: str, image: bytes) -> None:
    """Write the file here: the library answers a full disk with a handle that it can't close any more."""
    with open(path, "r+b", buffering=0) as file:
        for part in (_block(_BLOCK + len(image), xxhash.xxh3_128_hexdigest(image)), image):
            view = memoryview(part)
            while len(view):
                view = view[file.write(view) :]


def _block(size: int, digest: str) -> bytes:
    return (_MARK + b"%016x " % size + digest.encode()).ljust(_BLOCK, b"\0")


def _check_foreign(block: bytes, path: str) -> None:
    h5py: Any = plain.import_optional("h5py", "hdf5", path)
    if b"nanscan" in block or b"xxh3_128" in block or not h5py.is_hdf5(path):
        what = "is empty" if not block else "does not begin as one"
        raise CorruptCheckpoint(f"{path!r} is no HDF5 file, or a damaged one: it {what}. {_ADVICE}.")


def _damage(path: str) -> str:
    """Which datasets differ from their digests, if the file can still be read that far."""
    bad: list[str] = []
    try:
        with plain.import_optional("h5py", "hdf5", path).File(path, "r", locking=False) as file:
            file.visititems(lambda name, item: bad.append(name) if _is_bad(item) else None)
    except Exception:
        bad = []
    if bad:
        return f"tensor {', '.join(bad[:5])} is not what was saved."
    return "the HDF5 structure is not what was saved, or is cut off."


def _is_bad(item: Any) -> bool:
    digest = item.attrs.get("xxh3_128")
    return digest is not None and xxhash.xxh3_128_hexdigest(item[()].tobytes()) != digest


def _read_group(group: Any, device: torch.device, known: dict[Any, Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {name: _plain_value(value) for name, value in group.attrs.items()}
    for name in group:
        item = group.get(name, getlink=True)
        if type(item).__name__ != "HardLink":
            raise CheckpointError(
                f"{group.file.filename!r}: {group.name}/{name} is a link out of its place; not followed"
            )
        item = group[name]
        if hasattr(item, "keys"):
            found[name] = _read_group(item, device, known)
        else:
            key = item.id.__hash__()
            found[name] = known[key] if key in known else known.setdefault(key, _read_tensor(item, device))
    return found


def _read_tensor(dataset: Any, device: torch.device) -> Tensor:
    array = dataset[()]
    tensor = torch.from_numpy(array) if getattr(array, "ndim", 0) else torch.as_tensor(array, device="cpu")
    dtype = dataset.attrs.get("dtype")
    if isinstance(dtype, str) and dtype in _FOREIGN:
        tensor = tensor.view(getattr(torch, dtype))
    return tensor.to(device)


def _plain_value(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else value


FORMAT = Hdf5Format()
