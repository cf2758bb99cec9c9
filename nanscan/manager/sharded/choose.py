"""Which checkpoint the ranks restore together: the newest that verifies on all of them."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanscan.errors import CheckpointError
from nanscan.manager.folder import Entry, Folder
from nanscan.manager.sharded.marker import MARKER, Marker, check_files, read_marker
from nanscan.manager.sharded.ranks import Ranks
from nanscan.manager.sharded.reading import read_folder

__all__ = ["candidates", "read_sharded"]


def candidates(folder: Folder, only: Path | None, ranks: Ranks) -> tuple[list[Entry], list[Entry]]:
    """(complete checkpoints, newest first; incomplete folders), as the first rank sees them."""
    if only is not None:
        return [Entry(0, only)], []
    entries, incomplete = ranks.by_first(lambda: (folder.entries(), folder.incomplete()), "which checkpoints there are")
    return list(reversed(entries)), list(reversed(incomplete))


def read_sharded(entry: Entry, parts: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Verify a folder, each rank its share of the files, and read it.

    Raises:
        CheckpointError: it can't be used; the same on all ranks.
    """
    marker: Marker = ranks.by_first(lambda: _marker_of(entry), "the marker")
    names = sorted(marker.files)[ranks.index :: ranks.size]
    wrong = ranks.gather(check_files(entry.path, marker.files, names), "what is wrong with the files")
    if any(wrong):
        raise CheckpointError("; ".join(text for several in wrong for text in several))
    return read_folder(entry.path, marker, parts, ranks)


def _marker_of(entry: Entry) -> Marker:
    try:
        return read_marker(entry.path)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise CheckpointError(
                f"'{entry.path}' is an incomplete checkpoint, or a folder of others: there is no {MARKER} in it. Give "
                "the path of one checkpoint, or none for the newest of the manager's folder"
            ) from None
        raise
