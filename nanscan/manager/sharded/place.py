"""Folders of sharded checkpoints on the disk: made, put in the place of an older one, removed, cleaned up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path

from nanscan.checkpoint.system import refused
from nanscan.manager.sharded.marker import MARKER

__all__ = ["Place", "clean_up", "is_being_written", "remove", "sync_folder"]

_LOCK = ".writing"  # held by the first rank while the ranks write into the folder
_ASIDE = re.compile(r"\.(step-\d{8,})\.\w+\.(new|old)")


class Place:
    """A new folder that the ranks write into; the first rank makes it and holds it.

    Args:
        final: where the checkpoint is to be. A complete one that is there stays until the new one is complete.

    Attributes:
        path: the folder to write into.
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        replaces = (final / MARKER).is_file()
        self.path = final.with_name(f".{final.name}.{secrets.token_hex(4)}.new") if replaces else final
        self._fd: int | None = None

    def make(self) -> None:
        """Make it, without what a killed writer may have left there.

        Raises:
            CheckpointSystemError: the system refused.
        """
        try:
            if self.path.exists():
                remove(self.path)
            self.path.mkdir(parents=True)
            self._fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
            with contextlib.suppress(OSError):  # no locks on this file system
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise refused(error, str(self.path), "save") from error

    def finish(self) -> None:
        """The marker is written: the folder goes to where it is to be."""
        if self.path != self.final:
            aside = self.path.with_suffix(".old")
            os.rename(self.final, aside)
            os.rename(self.path, self.final)
            remove(aside)
        sync_folder(self.final.parent)
        self.let_go()

    def give_up(self) -> None:
        """It failed: nothing of it stays."""
        with contextlib.suppress(OSError):
            remove(self.path)
        self.let_go()

    def let_go(self) -> None:
        """Nobody writes there any more."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.final / _LOCK)
            os.close(fd)


def remove(path: Path) -> None:
    """Remove a checkpoint: a file, or a folder, whose marker goes first so that it is none from then on."""
    if path.is_dir() and not path.is_symlink():
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clean_up(folder: Path, incomplete: list[Path]) -> None:
    """Remove what killed writers left, as far as nobody writes there; put back what was being replaced.

    Args:
        folder: of the checkpoints.
        incomplete: the folders of checkpoints without a marker.
    """
    with contextlib.suppress(OSError):  # the next save tries again
        for path in sorted(folder.iterdir()):
            match = _ASIDE.fullmatch(path.name)
            if match is None or is_being_written(path):
                continue
            final = folder / match[1]
            if not final.exists() and (path / MARKER).is_file():
                os.rename(path, final)
            else:
                remove(path)
        for path in incomplete:
            if not is_being_written(path):
                remove(path)


def is_being_written(path: Path) -> bool:
    """True if a living process holds the folder."""
    try:
        fd = os.open(path / _LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
