"""Replacing a file in one moment: written beside it, flushed to the disk, checked, then renamed over it."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nanscan.checkpoint.system import full_disk_survived

__all__ = ["Replacement", "remove_leftovers", "replacing", "target_of"]

_FULL_DEVICE = os.makedev(1, 7)  # /dev/full
_LONGEST_STEM = 200  # bytes of the target's name kept in the temporary name, so that it stays below 255


@dataclass
class Replacement:
    """The file that is going to replace ``target``.

    Attributes:
        target: real path of the file that is replaced or made.
        path: the temporary file in the same folder.
        fd: open for reading and writing.
        check: called with ``fd`` after everything reached the disk and before the rename; raises if it is not right.
    """

    target: str
    path: str
    fd: int
    check: Callable[[int], None] | None = None

    def follow(self) -> None:
        """Open ``path`` anew, and lock it, if a library has put another file there."""
        if os.path.samestat(os.stat(self.path), os.fstat(self.fd)):
            return
        fd = os.open(self.path, os.O_RDWR)
        os.dup2(fd, self.fd, inheritable=False)
        os.close(fd)
        _lock(self.fd)


def target_of(path: str) -> str:
    """The real path of the file to replace, links followed.

    Raises:
        OSError: ``path`` is a directory, no ordinary file, protected against writing, or no path at all.
    """
    if not path or "\0" in path:
        raise OSError(errno.EINVAL, "not a path: it is empty or holds a null character")
    target = os.path.realpath(path)
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if path.endswith(os.sep):
            raise OSError(errno.EISDIR, "a directory") from None
        return target
    _check_replaceable(target, found)
    return target


def _check_replaceable(target: str, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, "a directory")
    if stat.S_ISCHR(found.st_mode) and found.st_rdev == _FULL_DEVICE:
        raise OSError(errno.ENOSPC, "always full")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(
            errno.EINVAL, "it is a device, pipe or socket, not a file that could be replaced; give a file name"
        )
    if not (found.st_mode & 0o222 and os.access(target, os.W_OK)):
        raise OSError(errno.EACCES, "read-only")


@contextmanager
def replacing(target: str) -> Iterator[Replacement]:
    """Write the new content of ``target`` into ``.fd``; at the end of the block it replaces the file in one moment.

    After any exception, `KeyboardInterrupt` too, ``target`` is what it was and the temporary file is gone. Mode bits
    and, where permitted, ownership of a file that is there are kept; missing folders are made.
    """
    folder = os.path.dirname(target)
    made = _make_folders(folder)
    new: Replacement | None = None
    try:
        remove_leftovers(target)
        with full_disk_survived():
            new = _open_beside(target)
            yield new
            _finish(new, folder)
    except BaseException:
        if new is not None:
            _remove(new.path)
        for name in made:
            with suppress(OSError):
                os.rmdir(name)
        raise
    finally:
        if new is not None:
            os.close(new.fd)
    for name in [folder, *map(os.path.dirname, made)]:
        _sync_folder(name)


def _finish(new: Replacement, folder: str) -> None:
    _keep_access(new)
    os.fsync(new.fd)
    if new.check is not None:
        new.check(new.fd)
    os.replace(new.path, new.target)


def _make_folders(folder: str) -> list[str]:
    """Make what is missing; returns it, innermost first."""
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for name in reversed(missing):
        try:
            os.mkdir(name)
        except FileExistsError:
            if not os.path.isdir(name):
                raise OSError(errno.ENOTDIR, "not a folder") from None
    return missing


def _open_beside(target: str) -> Replacement:
    """A new, empty, locked temporary file in the folder of ``target``."""
    mode = _mode_of(target)
    while True:
        path = f"{_prefix(target)}{os.getpid()}.{secrets.token_hex(4)}.tmp"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        try:
            _lock(fd)
            if os.fstat(fd).st_nlink:  # else another saver took it for a leftover before it was locked
                return Replacement(target, path, fd)
        except BaseException:
            _remove(path)
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int) -> None:
    with suppress(OSError):  # no locks on this file system: then the process id alone tells who owns it
        fcntl.flock(fd, fcntl.LOCK_EX)


def _mode_of(target: str) -> int:
    """Nobody may read the temporary file who may not read the file that it replaces."""
    try:
        return stat.S_IMODE(os.stat(target).st_mode) & 0o777
    except FileNotFoundError:
        return 0o666  # less the umask


def _prefix(target: str) -> str:
    folder, name = os.path.split(target)
    stem = os.fsencode(name)
    if len(stem) > _name_max(folder):
        raise OSError(errno.ENAMETOOLONG, "name too long")
    return os.path.join(folder, f".{stem[:_LONGEST_STEM].decode('utf-8', 'ignore')}.")


def _name_max(folder: str) -> int:
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except (OSError, ValueError):
        return 255


def remove_leftovers(target: str) -> list[str]:
    """Remove temporary files for ``target`` whose process is gone (it was killed); returns their paths."""
    found = glob.glob(f"{glob.escape(_prefix(target))}*.????????.tmp")
    return [path for path in found if _remove_if_abandoned(path)]


def _remove_if_abandoned(path: str) -> bool:
    """Remove a temporary file unless somebody holds the lock that a saver keeps on it while it lives."""
    owner = path.split(".")[-3]
    if not owner.isdecimal():
        return False
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return _is_abandoned(fd, int(owner)) and _remove(path)
    finally:
        os.close(fd)


def _is_abandoned(fd: int, owner: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return not _is_running(owner)
    return True


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _remove(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _keep_access(new: Replacement) -> None:
    """Give the new file the owner and mode bits of the one that it replaces."""
    try:
        old = os.stat(new.target)
    except FileNotFoundError:
        return
    with suppress(OSError):  # only root may give files away
        os.fchown(new.fd, old.st_uid, old.st_gid)
    with suppress(OSError):
        os.fchmod(new.fd, stat.S_IMODE(old.st_mode))


def _sync_folder(folder: str) -> None:
    """Make the rename itself survive a power cut."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # a folder that may be written but not listed
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS, errno.EBADF):
            raise
    finally:
        os.close(fd)
