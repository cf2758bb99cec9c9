"""What the system says when it refuses: an `OSError` of a save or load as one `CheckpointSystemError`."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from nanscan.errors import CheckpointSystemError
from nanscan.foreign_files import kind_of_folder

__all__ = ["full_disk_survived", "refused"]

_NETWORK = "the network file system lost the file or does not answer: check its mount, then try again"
_CURE = {
    **dict.fromkeys((errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EREMOTEIO), _NETWORK),
    errno.EBUSY: "it is in use, such as a file that is mounted by itself: save into a folder that is mounted",
    errno.EXDEV: "it can't be renamed within its folder, which spans several file systems: save elsewhere",
    errno.EACCES: "permission denied: make it writable for this user, or save elsewhere",
    errno.EDQUOT: "the disk quota is exceeded: remove files of this user, or save elsewhere",
    errno.EIO: "the device reports an input/output error: it may be failing; save elsewhere and check it",
    errno.EISDIR: "it is a directory: add a file name",
    errno.ELOOP: "its symbolic links go in a circle: remove one of them",
    errno.EMFILE: "too many files are open in this process: close some, or raise the limit (ulimit -n)",
    errno.ENAMETOOLONG: "the name is too long: most file systems take 255 bytes for a name and 4,096 for a path",
    errno.ENOENT: "there is no such file or folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EPERM: "the operation is not permitted: it may be immutable or belong to another user; save elsewhere",
    errno.EROFS: "the file system is read-only: save elsewhere",
}


def refused(error: OSError, path: str, doing: str, needed: int | None = None, after: str = "") -> CheckpointSystemError:
    """The error to raise for what the system refused.

    Args:
        error: what was caught.
        path: the file that was asked for.
        doing: "save" or "load".
        needed: about how many bytes the file takes, where that is known.
        after: what holds now, one sentence.
    """
    number = error.errno or errno.EIO
    folder = kind_of_folder(path) if number == errno.EISDIR and doing == "load" else None
    known = f"it is {folder}" if folder else _full(number, path, needed) or _CURE.get(number)
    reason = known or (error.strerror or str(error)).lower()
    text = f"cannot {doing} {path!r}: {reason}"
    return CheckpointSystemError(number, f"{text}. {after}".rstrip(". ") + "." if after else text, path)


def _full(number: int, path: str, needed: int | None) -> str | None:
    wanted = "" if needed is None else f"{needed:,} bytes needed, "
    if number == errno.ENOSPC:
        return f"No space left on device ({wanted}{_free(path)}): remove files, or save elsewhere"
    if number == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        size = "the file system's" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes, ulimit -f"
        return f"the file is larger than the limit ({wanted}limit {size}): raise the limit, or save elsewhere"
    return None


def _free(path: str) -> str:
    """Bytes that this user may still write in the folder of ``path``."""
    if os.path.exists(path) and not os.path.isfile(path):  # /dev/full
        return "0 bytes free"
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        found = os.statvfs(folder)
    except OSError:
        return "free space unknown"
    return f"{found.f_bavail * found.f_frsize:,} bytes free"


@contextmanager
def full_disk_survived() -> Iterator[None]:
    """Writing beyond the limit on file sizes gives an `OSError` here, also where SIGXFSZ would end the process."""
    if signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN:  # Python's own choice
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXFSZ})
    try:
        yield
    finally:
        while signal.SIGXFSZ in signal.sigpending() and signal.sigtimedwait({signal.SIGXFSZ}, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
