"""Which checkpoints stay: the newest good ones and the best ones. Deletes the others, never the last good one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nanscan import messages
from nanscan.checkpoint.load import verify_file
from nanscan.errors import CheckpointError, CheckpointWarning
from nanscan.manager.folder import Entry, Folder, Signature
from nanscan.manager.metric import Metric, as_number
from nanscan.manager.sharded.marker import check_files, read_marker
from nanscan.manager.sharded.place import remove

__all__ = ["Retention", "expendable"]


class Retention:
    """Keeps a folder to the newest `keep` good checkpoints and the `best_keep` best good ones.

    What the manager wrote itself is known to be good; other files are read and verified once.

    Args:
        folder: of the checkpoints.
        keep: how many of the newest.
        metric: by which there is a best; None: there is none.
        best_keep: how many of the best.
    """

    def __init__(self, folder: Folder, keep: int, metric: Metric | None, best_keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._metric = metric
        self._best_keep = best_keep if metric is not None else 0
        self._good: dict[Path, tuple[Signature, bool]] = {}
        self._metrics: dict[Path, tuple[Signature, float | None]] = {}

    def wrote(self, entry: Entry, metric: float | None) -> None:
        """Note a file that was just written, and verified."""
        signature = entry.signature()
        if signature is not None:
            self._good[entry.path] = signature, True
            self._metrics[entry.path] = signature, metric

    def apply(self, step: int) -> None:
        """Delete what need not stay, after the checkpoint of `step` is safely there. Later steps are left alone."""
        if len(self._folder.entries()) <= self._keep:
            return
        with self._folder.locked() as mine:
            if mine:
                entries = [entry for entry in self._folder.entries() if entry.step <= step]
                for entry in expendable(entries, self._keep, self.is_good, self.best(entries)):
                    self._delete(entry)

    def best(self, entries: Sequence[Entry]) -> list[Entry]:
        """The best good ones of `entries`, best first; of equal ones the newer."""
        metric = self._metric
        if metric is None:
            return []
        ranks = {entry: metric.rank(self.metric(entry)) for entry in entries}
        ordered = sorted((rank, entry) for entry, rank in ranks.items() if rank is not None)
        found: list[Entry] = []
        for _, entry in reversed(ordered):
            if len(found) == self._best_keep:
                break
            if self.is_good(entry):
                found.append(entry)
        return found

    def is_good(self, entry: Entry) -> bool:
        """True if the file verifies; looked at once as long as it isn't replaced."""
        return bool(_remembered(self._good, entry, _verifies, False))

    def metric(self, entry: Entry) -> float | None:
        """The metric in the file, None if it has none or can't be read."""
        name = "" if self._metric is None else self._metric.name
        found: float | None = _remembered(self._metrics, entry, lambda path: _read_metric(path, name), None)
        return found

    def _delete(self, entry: Entry) -> None:
        try:
            remove(entry.path)
        except OSError as error:
            messages.warn(
                f"nanscan: the old checkpoint '{entry.path}' can't be removed: {error.strerror or error}. "
                "Training and saving go on.",
                CheckpointWarning,
            )
            return
        self._good.pop(entry.path, None)
        self._metrics.pop(entry.path, None)


def expendable(
    entries: Sequence[Entry], keep: int, is_good: Callable[[Entry], bool], best: Sequence[Entry]
) -> list[Entry]:
    """Those of `entries` (oldest first) that are older than the newest `keep` good ones, and not among the best.

    Where there are fewer than `keep` good ones, none is.
    """
    good = 0
    for index in range(len(entries) - 1, -1, -1):
        good += is_good(entries[index])
        if good == keep:
            return [entry for entry in entries[:index] if entry not in best]
    return []


def _remembered(known: dict[Path, tuple[Signature, Any]], entry: Entry, find: Callable[[Path], Any], gone: Any) -> Any:
    """`find(path)`, asked again only when the file is another one."""
    signature = entry.signature()
    if signature is None:
        return gone
    if entry.path not in known or known[entry.path][0] != signature:
        known[entry.path] = signature, find(entry.path)
    return known[entry.path][1]


def _verifies(path: Path) -> bool:
    try:
        if path.is_dir():
            files = read_marker(path).files
            return not check_files(path, files, list(files))
        verify_file(path)
    except (CheckpointError, OSError):
        return False
    return True


def _read_metric(path: Path, name: str) -> float | None:
    """The number `extra[name]` of a checkpoint; its tensors are mapped, not read."""
    try:
        if path.is_dir():
            return read_marker(path).metric.get(name)
        extra = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["extra"]
        return as_number(extra[name])
    except Exception:  # whatever a foreign or torn file makes torch say: it has no metric
        return None
