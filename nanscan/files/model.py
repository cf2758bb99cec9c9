"""Scan everything that was named: files, folders, and models in shards, whose index must match what they hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nanscan.errors import CheckpointError, CorruptCheckpoint
from nanscan.files.folders import INDEX_SUFFIX, Index, expand
from nanscan.files.scan import FileScan, TensorRow, scan_file

__all__ = ["FileScan", "TensorRow", "scan_all"]

Progress = Callable[[Path, int, int], None]  # file, bytes done, bytes in all
_LISTED = 5


def scan_all(paths: Sequence[Path], progress: Progress) -> Iterator[FileScan]:
    """Scan files one after the other; every error becomes a result.

    Args:
        paths: files, folders and indexes of shards.
        progress: called with the file, the bytes done and the bytes in all.

    Yields:
        One result for each file; that of an index follows its shards and says what is missing.
    """
    done: set[str] = set()
    for path in paths:
        for file in _expanded(path):
            if isinstance(file, FileScan):
                yield file
            elif file.name.endswith(INDEX_SUFFIX):
                yield from _scan_index(file, progress, done)
            elif os.path.realpath(file) not in done:
                done.add(os.path.realpath(file))
                yield _scan(file, progress)


def _expanded(path: Path) -> Iterator[Path | FileScan]:
    try:
        yield from list(expand([path]))
    except CheckpointError as error:
        yield FileScan(path, error=str(error), misuse=True)
    except OSError as error:
        yield FileScan(path, error=error.strerror or str(error), misuse=True)


def _scan(path: Path, progress: Progress) -> FileScan:
    return scan_file(path, lambda done, total: progress(path, done, total))


def _scan_index(path: Path, progress: Progress, done: set[str]) -> Iterator[FileScan]:
    result = FileScan(path, "index of shards")
    try:
        result.size = path.stat().st_size
        index = Index.read(path)
    except CorruptCheckpoint as error:
        result.error = str(error)
        yield result
        return
    except OSError as error:
        result.error, result.misuse = error.strerror or str(error), True
        yield result
        return
    wrong: list[str] = []
    for shard, names in index.shards.items():
        if not shard.is_file():
            wrong.append(f"shard '{shard.name}' is missing ({len(names)} tensors)")
            continue
        done.add(os.path.realpath(shard))
        scanned = _scan(shard, progress)
        yield scanned
        absent = [name for name in names if name not in scanned.names]
        if absent and scanned.error is None:
            wrong.append(f"shard '{shard.name}' lacks {len(absent)} of {len(names)} tensors: {_listed(absent)}")
    result.error = "; ".join(wrong) or None
    yield result


def _listed(names: list[str]) -> str:
    listed = ", ".join(f"'{name[:200]}'" for name in names[:_LISTED])
    return listed + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
