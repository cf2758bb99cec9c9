"""What goes through torch.distributed.checkpoint: tensors to and from files, with digests of what is written."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nanscan.checkpoint.system import refused
from nanscan.errors import CheckpointError
from nanscan.manager.sharded.marker import Digest
from nanscan.manager.sharded.ranks import Ranks, RanksLost

__all__ = ["METADATA", "read_metadata", "read_tensors", "write_tensors"]

METADATA = ".metadata"
_LISTS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_PLAIN = {
    ("collections", "OrderedDict"), ("collections", "defaultdict"), ("builtins", "set"), ("builtins", "frozenset"),
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),
}  # fmt: skip


def write_tensors(state: dict[str, Any], folder: Path, ranks: Ranks) -> dict[str, Digest]:
    """Write this rank's part of the tensors, flushed to the disk; all ranks together.

    Returns:
        Name -> what the file must hold, of the files that this rank wrote.

    Raises:
        CheckpointError: a rank could not write; raised on all.
    """
    writer = FileSystemWriter(folder, sync_files=True, overwrite=True)
    files = _DigestingFiles()
    writer.fs = files
    how: Any = {"process_group": ranks.group, "no_dist": ranks.group is None}
    _run(lambda: save(state, storage_writer=writer, **how), folder, ranks)
    return {name.removesuffix(".tmp"): digest for name, digest in files.digests.items()}


def read_tensors(state: dict[str, Any], folder: Path, ranks: Ranks) -> None:
    """Fill the tensors of `state`; of a DTensor this rank's shard, wherever the saved ones began and ended.

    Raises:
        CheckpointError: a rank could not read; raised on all.
    """
    reader = _Reader(folder)
    how: Any = {"process_group": ranks.group, "no_dist": ranks.group is None}
    _run(lambda: load(state, storage_reader=reader, **how), folder, ranks)


def read_metadata(folder: Path) -> Metadata:
    """Which tensors there are, as torch wrote it down; nothing in it is run."""
    found: Metadata = _Reader(folder).read_metadata()
    return found


def _run(call: Any, folder: Path, ranks: Ranks) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a process alone is meant
            call()
    except CheckpointException as error:
        index, (cause, _) = min(error.failures.items())
        who = "" if ranks.group is None else f" (on rank {ranks.ranks[index]})"
        if isinstance(cause, OSError):
            raise refused(cause, f"{folder}{who}", "save") from error
        raise CheckpointError(f"'{folder}'{who}: {type(cause).__name__}: {cause}") from error
    except RuntimeError as error:
        raise RanksLost(
            f"nanscan: the checkpoint '{folder}' was given up: the ranks {ranks.ranks} could not agree on it: "
            f"{error}. A rank has died, or waits elsewhere. Checkpoints that were complete before stay; restart from "
            "the newest of them"
        ) from error


class _DigestingFiles(FileSystem):
    """Files whose digest is known when they are written.

    Attributes:
        digests: name -> what was written.
    """

    def __init__(self) -> None:
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            written = _Digesting(stream)
            yield written
        self.digests[Path(path).name] = Digest(written.size, written.hash.hexdigest())


class _Digesting(io.IOBase):
    """A file being written from front to back."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = 0
        self.hash = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        self.size += memoryview(data).nbytes
        return int(self._file.write(data))

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        self._file.flush()
        return int(self._file.fileno())

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()


class _Reader(FileSystemReader):
    """Reads torch's list of tensors without running what a changed one might ask for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self.fs.concat_path(self.path, METADATA), "rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = module in _LISTS and "." not in name
        if known or (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(__import__("torch"), name, None), __import__("torch").dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no list of tensors needs")
