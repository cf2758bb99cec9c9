"""A folder of finished builds that several processes share: each is built once, and a dead builder blocks nobody."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["BuildFailed", "build_once"]

LOCK_NAME = "build.lock"
_WORK_PREFIX = "work-"
_QUIET_WAIT = 1.0  # seconds of waiting for another process before it is worth a line


class BuildFailed(Exception):
    """A build that can't be done or went wrong.

    Attributes:
        cause: what happened, in whole sentences, possibly with the compiler's words.
        remedy: what to do about it: a command or a variable to set.
    """

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(f"{cause} {remedy}")
        self.cause = cause
        self.remedy = remedy


def build_once(target: Path, what: str, build: Callable[[Path], Path], timeout: float) -> Path:
    """Have ``target`` built by exactly one of the processes that ask for it.

    The build runs in a new folder beside the target and its product is renamed into place, so that the target is
    either whole or not there. The lock belongs to the operating system: it goes away with the process that holds it.

    Args:
        target: the file wanted; if it is there, nothing is done. Its folder is made.
        what: what is built, for the line on the standard error stream.
        build: makes the file somewhere in the (empty) folder it is given, and returns its path.
        timeout: seconds to wait for another process that is building the same.

    Returns:
        ``target``.

    Raises:
        BuildFailed: the folder can't be written, the wait was too long, or ``build`` raised it.
    """
    if target.exists():
        return target
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _build_locked(target, what, build, timeout)
    except OSError as error:
        raise BuildFailed(
            f"The cache folder {folder} can't be used: {error}.",
            "Set NANSCAN_CACHE_DIR to a folder that can be written.",
        ) from error


def _build_locked(target: Path, what: str, build: Callable[[Path], Path], timeout: float) -> Path:
    lock = _acquire(target.parent / LOCK_NAME, what, timeout)
    try:
        if target.exists():  # another process was faster
            return target
        for leftover in target.parent.glob(f"{_WORK_PREFIX}*"):  # of a builder that died: the lock is ours
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=target.parent))
        try:
            _announced(target, what, lambda: os.replace(build(work), target))
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return target
    finally:
        lock.release()


def _announced(target: Path, what: str, work: Callable[[], None]) -> None:
    """Do the work, with one line that says what is going on, where it is kept and how long it took."""
    start = time.monotonic()
    _say(f"nanscan: building {what}, once, into {target.parent} ...", end="")
    try:
        work()
    except BaseException:
        _say(f" failed after {time.monotonic() - start:.1f} s")
        raise
    _say(f" done in {time.monotonic() - start:.1f} s")


def _acquire(path: Path, what: str, timeout: float) -> FileLock:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=min(_QUIET_WAIT, timeout))
    except Timeout:
        _say(f"nanscan: waiting up to {timeout:.0f} s for another process that is building {what} (lock: {path})")
        try:
            lock.acquire(timeout=max(0.0, timeout - _QUIET_WAIT))
        except Timeout as error:
            raise BuildFailed(
                f"Another process has held the lock {path} for more than {timeout:g} s.",
                "If it is still building, raise NANSCAN_BUILD_TIMEOUT; if it hangs, end it.",
            ) from error
    return lock


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
