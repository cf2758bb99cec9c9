"""The marker of a complete sharded checkpoint: written last, it lists every file with its size and digest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from nanscan._version import __version__
from nanscan.checkpoint.atomic import replacing
from nanscan.checkpoint.digest import digest_range
from nanscan.errors import CorruptCheckpoint

__all__ = ["MARKER", "Digest", "Marker", "check_files", "digest_of", "read_marker", "write_marker"]

MARKER = "complete.json"
_FORMAT = "nanscan-sharded-checkpoint"
_VERSION = 1


class Digest(NamedTuple):
    """Size in bytes and xxh3_128 digest of a file."""

    size: int
    xxh3_128: str


class Marker(NamedTuple):
    """What the marker says.

    Attributes:
        step: of the checkpoint.
        ranks: how many wrote it.
        files: name -> what the file is.
        metric: the number of `best` by its name, if there is one.
    """

    step: int
    ranks: int
    files: dict[str, Digest]
    metric: dict[str, float] = {}


def write_marker(folder: Path, marker: Marker) -> None:
    """Write it in one moment, flushed to the disk: from then on the folder is a checkpoint."""
    content: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "nanscan": __version__, **marker._asdict()}
    content["files"] = {name: list(digest) for name, digest in marker.files.items()}
    content["digest"] = _own_digest(content)
    data = json.dumps(content, indent=1).encode()
    with replacing(str(folder / MARKER)) as new:
        os.write(new.fd, data)


def read_marker(folder: Path) -> Marker:
    """What the marker of a checkpoint says.

    Raises:
        FileNotFoundError: there is none, the checkpoint is incomplete.
        CorruptCheckpoint: it is damaged, or of a later version.
    """
    data = (folder / MARKER).read_bytes()
    try:
        content = json.loads(data)
        told = content.pop("digest")
        if told != _own_digest(content) or content["format"] != _FORMAT:
            raise ValueError("its digest differs")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"'{folder / MARKER}' is corrupt: {error}") from None
    if content["version"] > _VERSION:
        raise CorruptCheckpoint(
            f"'{folder}' has version {content['version']} of the format, this nanscan reads up to {_VERSION}: update it"
        )
    files = {name: Digest(*item) for name, item in content["files"].items()}
    return Marker(content["step"], content["ranks"], files, content["metric"])


def check_files(folder: Path, files: Mapping[str, Digest], names: Sequence[str]) -> list[str]:
    """What is wrong with these files, a sentence for each that is not what was saved."""
    found = []
    for name in names:
        try:
            now = digest_of(folder / name)
        except OSError as error:
            found.append(f"'{name}' can't be read: {error.strerror or error}")
            continue
        if now != files[name]:
            size = f"{now.size:,} bytes instead of {files[name].size:,}, " if now.size != files[name].size else ""
            found.append(f"'{name}' is corrupt: {size}its xxh3_128 digest differs from what was saved")
    return found


def digest_of(path: Path) -> Digest:
    """Size and digest of a file, read from the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        return Digest(size, digest_range(fd, 0, size).hex())
    finally:
        os.close(fd)


def _own_digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
