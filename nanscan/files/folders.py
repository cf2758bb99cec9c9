"""From what is named on the command line to single files: folders, and models in shards with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nanscan.errors import CorruptCheckpoint
from nanscan.files.formats import SUFFIXES
from nanscan.files.source import UnreadableFile
from nanscan.foreign_files import kind_of_folder

__all__ = ["INDEX_SUFFIX", "Index", "expand"]

INDEX_SUFFIX = ".index.json"
_MAX_INDEX = 1 << 28


@dataclass
class Index:
    """The index of a model in shards: which tensor is in which file.

    Attributes:
        path: of the index.
        shards: file -> names of the tensors that it should hold.
    """

    path: Path
    shards: dict[Path, list[str]] = field(default_factory=dict)

    @property
    def missing(self) -> list[Path]:
        """The shards that are not there."""
        return [path for path in self.shards if not path.is_file()]

    @classmethod
    def read(cls, path: Path) -> Index:
        """Read an index.

        Raises:
            CorruptCheckpoint: it is none, or it names files outside of its folder.
            OSError: it can't be read.
        """
        if path.stat().st_size > _MAX_INDEX:
            raise CorruptCheckpoint("it is too large for an index")
        try:
            weights = json.loads(path.read_bytes())["weight_map"]
            named = [(str(name), file) for name, file in weights.items()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpoint(f"it is no index of shards: {error or 'no weight_map'}"[:300]) from error
        index = cls(path)
        for name, file in named:
            if (
                not isinstance(file, str)
                or not file
                or "\0" in file
                or Path(file).is_absolute()
                or ".." in Path(file).parts
            ):
                raise CorruptCheckpoint(f"it places '{name[:100]}' in {str(file)[:100]!r}, outside of its folder")
            index.shards.setdefault(path.parent / file, []).append(name)
        return index


def expand(paths: Iterable[Path]) -> Iterator[Path]:
    """Every file to scan, each once; an index stands for itself, before its shards.

    Args:
        paths: files and folders; folders are searched recursively, by suffix, links to folders followed once.

    Yields:
        Files in the order given, those of a folder sorted; and what isn't there, or can't be listed, for its reader to
        say so.

    Raises:
        UnreadableFile: a folder holds no file with a known suffix.
    """
    seen: set[str] = set()
    for path in paths:
        for file in _in_folder(path) if path.is_dir() else [path]:
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file


def _in_folder(folder: Path) -> list[Path]:
    found: list[Path] = []
    visited: set[str] = set()

    def unlisted(error: OSError) -> None:
        found.append(Path(error.filename))

    for here, folders, files in os.walk(folder, onerror=unlisted, followlinks=True):
        real = os.path.realpath(here)
        if real in visited:  # a link back
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if kind_of_folder(here):
            found.append(Path(here))  # what is not read has to be said
        found += [Path(here, name) for name in sorted(files, key=_index_first) if _is_known(name)]
    if not found:
        known = ", ".join(sorted(SUFFIXES))
        raise UnreadableFile(f"no file in this folder has a known suffix ({known}): name the file itself")
    return found


def _index_first(name: str) -> tuple[bool, str]:
    return not name.endswith(INDEX_SUFFIX), name


def _is_known(name: str) -> bool:
    return not name.startswith(".") and (Path(name).suffix.lower() in SUFFIXES or name.endswith(INDEX_SUFFIX))
