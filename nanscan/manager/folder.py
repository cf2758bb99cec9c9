"""The folder of checkpoints: names, what is there, the lock that processes share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from nanscan import messages
from nanscan.errors import CheckpointSystemError, CheckpointWarning
from nanscan.manager.sharded.marker import MARKER

__all__ = ["Entry", "Folder", "Signature"]

LOCK_NAME = ".nanscan-checkpoints.lock"
LOCK_SECONDS = 60.0
_NAME = re.compile(r"step-(\d{8,})(\.pt)?")
_TEMPORARY = re.compile(r"\.step-(\d{8,})\.pt\.\d+\.\w+\.tmp")

Signature = tuple[int, int, int]


class Entry(NamedTuple):
    """One checkpoint, by its name: a file, or the folder of a sharded one."""

    step: int
    path: Path

    @property
    def is_sharded(self) -> bool:
        """True for a folder."""
        return self.path.is_dir()

    def signature(self) -> Signature | None:
        """What changes when it is replaced: inode, size, time of change (of a folder's marker); None if it is gone."""
        try:
            found = (self.path / MARKER if self.is_sharded else self.path).stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


class Folder:
    """The files `step-00000120.pt` and folders `step-00000120` of a folder; all else is foreign and never touched.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._asked = False

    def file(self, step: int) -> Path:
        """Where the checkpoint of `step` is.

        >>> Folder(Path("run")).file(120).as_posix()
        'run/step-00000120.pt'
        """
        return self.path / f"step-{step:08d}.pt"

    def directory(self, step: int) -> Path:
        """Where the sharded checkpoint of `step` is."""
        return self.file(step).with_suffix("")

    def entries(self) -> list[Entry]:
        """The checkpoints that are there, oldest step first; folders without a marker are not.

        Raises:
            CheckpointSystemError: the folder can't be read (one that does not exist is empty).
        """
        return [entry for entry in self._named() if entry.path.is_file() or (entry.path / MARKER).is_file()]

    def left_behind(self, step: int) -> list[str]:
        """A sentence about the checkpoints of later steps than `step`, which is about to be saved first; then none."""
        first, self._asked = not self._asked, True
        try:
            later = [entry for entry in self.entries() if entry.step > step] if first else []
        except CheckpointSystemError:  # the save will say so
            return []
        if not later:
            return []
        return [
            f"'{self.path}' holds {len(later)} checkpoint(s) of later steps than step {step}, up to "
            f"{later[-1].path.name}: restore() will take the newest of those, not what is saved now. If another run "
            "left them, move them away or use a folder of its own"
        ]

    def incomplete(self) -> list[Entry]:
        """The folders of sharded checkpoints without a marker, oldest first: being written, or their writer died."""
        return [entry for entry in self._named() if entry.is_sharded and not (entry.path / MARKER).is_file()]

    def _named(self) -> list[Entry]:
        try:
            paths = list(self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            reason = "it is a file" if self.path.is_file() else error.strerror or str(error)
            text = f"cannot list the checkpoints in '{self.path}': {reason}; give a folder that can be read"
            raise CheckpointSystemError(error.errno or 0, text, str(self.path)) from error
        found = [(Entry(int(match[1]), path), match[2]) for path in paths if (match := _NAME.fullmatch(path.name))]
        return sorted(
            entry
            for entry, suffix in found
            if (entry.path == self.file(entry.step) and entry.path.is_file())
            or (suffix is None and entry.path == self.directory(entry.step) and entry.is_sharded)
        )

    def unfinished(self) -> list[Path]:
        """The checkpoints for which there is a temporary file: it is being written, or its writer was killed."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        return sorted({self.file(int(match[1])) for name in names if (match := _TEMPORARY.fullmatch(name))})

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the folder against other processes; yields False, after a warning, if that isn't possible."""
        lock = FileLock(self.path / LOCK_NAME, timeout=LOCK_SECONDS)
        try:
            lock.acquire()
        except (OSError, NotImplementedError, Timeout) as error:
            messages.warn(
                f"nanscan: old checkpoints in '{self.path}' are not removed now: the lock {LOCK_NAME} could not be "
                f"taken ({type(error).__name__}: {error}). The next save tries again.",
                CheckpointWarning,
            )
            yield False
            return
        try:
            yield True
        finally:
            lock.release()
