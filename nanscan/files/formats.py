"""Which format a file has: its content decides, its suffix only says what it should have been."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanscan.errors import CorruptCheckpoint
from nanscan.files.entry import Contents
from nanscan.files.hdf5 import HDF5_MAGIC, read_hdf5
from nanscan.files.npy import NPY_MAGIC, read_npy, read_npz
from nanscan.files.safetensors_file import looks_like_safetensors, read_safetensors
from nanscan.files.source import FileBytes, UnreadableFile, read_bytes
from nanscan.files.torch_legacy import read_pickle
from nanscan.files.torch_zip import ZipMembers, read_torch_zip
from nanscan.foreign_files import kind_by_head, kind_by_members, kind_of_folder

__all__ = ["SUFFIXES", "open_file"]

SUFFIXES = frozenset({
    ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".safetensors", ".h5", ".hdf5", ".npz", ".npy",
})  # fmt: skip
_PICKLES = SUFFIXES - {".safetensors", ".h5", ".hdf5", ".npz", ".npy"}
_USER_BLOCKS = (0, 512, 1024, 2048, 4096)  # an HDF5 file may begin behind somebody else's header


@contextmanager
def open_file(path: Path) -> Iterator[Contents]:
    """List the tensors of one file; their bytes are read later, a block at a time, before the context ends.

    Raises:
        CorruptCheckpoint: it is damaged, or not what its suffix says.
        UnreadableFile: there is no reader for it, or the reader's package is not installed.
        OSError: it can't be opened.
    """
    if not path.is_file():
        if path.exists() and not path.is_dir():
            raise UnreadableFile("it is neither a file nor a folder")
        folder = kind_of_folder(path)
        if folder:
            raise UnreadableFile(f"it is {folder}")
        open(path, "rb").close()  # says why
    with open(path, "rb", buffering=0) as opened:
        file = FileBytes(opened, 0, opened.seek(0, 2))
        contents = _read(path, file, bytes(read_bytes(file, 0, min(file.size, 512))))
        try:
            yield contents.check()
        finally:
            contents.close()


def _read(path: Path, file: FileBytes, start: bytes) -> Contents:
    if start.startswith(b"PK\x03\x04") or start.startswith(b"PK\x05\x06"):
        return _read_zip(ZipMembers(file))
    if any(_has(file, at, HDF5_MAGIC) for at in _USER_BLOCKS):
        return read_hdf5(path)
    if start.startswith(NPY_MAGIC):
        return read_npy(file)
    if looks_like_safetensors(start, file.size) or (path.suffix.lower() == ".safetensors" and file.size >= 8):
        return read_safetensors(file)
    if _looks_like_pickle(path, start):
        return read_pickle(file)
    raise _foreign(path, file, start)


def _read_zip(zipped: ZipMembers) -> Contents:
    if any(name.endswith("/data.pkl") and name.count("/") == 1 for name in zipped.members):
        return read_torch_zip(zipped)
    if zipped.members and any(name.endswith(".npy") for name in zipped.members):
        return read_npz(zipped)
    if not zipped.members:
        return Contents("npz", [])  # what numpy.savez makes of nothing
    what = kind_by_members(zipped.members)
    if what:
        raise UnreadableFile(f"it is {what}")
    raise CorruptCheckpoint("it is a zip, but neither one of torch.save nor an .npz: no data.pkl and no arrays in it")


def _has(file: FileBytes, at: int, magic: bytes) -> bool:
    return at + len(magic) <= file.size and bytes(read_bytes(file, at, len(magic))) == magic


def _looks_like_pickle(path: Path, start: bytes) -> bool:
    """Protocol 2 and later begin with 0x80 and their number; 0 and 1 are believed where the suffix fits."""
    if len(start) >= 2 and start[0] == 0x80 and start[1] <= 5:
        return True
    return path.suffix.lower() in _PICKLES and start[:1] in b"()]}c" and len(start) > 1


def _foreign(path: Path, file: FileBytes, start: bytes) -> Exception:
    is_tar = _has(file, 257, b"ustar")
    if is_tar:
        return UnreadableFile("it is a tar archive (PyTorch before 0.2 saved such): load it there and save it again")
    known = path.suffix.lower() in SUFFIXES
    what = kind_by_head(start) or ("JSON, which holds no tensors" if start[:1] == b"{" else None)
    if what is None:
        what = "empty" if file.size == 0 else f"of no known format (it begins with {start[:8]!r})"
    if known:
        return CorruptCheckpoint(f"it is {what}")
    return UnreadableFile(f"it is {what}: known are the files of torch.save, safetensors, HDF5, .npz, .npy and pickle")
