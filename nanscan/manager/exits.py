"""The ends of a process: what is pending is written at interpreter exit and on SIGTERM.

One SIGTERM handler serves all open managers. It is installed by the first one that is made in the main thread, calls
the handler that was there before, and goes when the last manager is closed.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # its exit hook must be registered before ours, to be run after it
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

__all__ = ["deferred", "unwatch", "watch"]


class Watched(Protocol):
    """What the ends of a process are told to."""

    def _finish_at_exit(self) -> None:
        """Write what is pending."""

    def _stop(self) -> bool:
        """Note that the process is to end; True if the training loop ends by itself."""


_open: weakref.WeakSet[Any] = weakref.WeakSet()
_owner = os.getpid()  # a forked child has the set, but neither the threads nor the right to write
_registered = False
_previous: Any = None  # the SIGTERM handler that ours replaced; None: ours is not installed
_busy = 0  # the main thread is inside this many saves
_late = False  # a SIGTERM came meanwhile
_handling = False


def watch(manager: Watched, *, sigterm: bool) -> None:
    """Have `manager` finish its writes at exit and, if asked, on SIGTERM. It is held weakly."""
    global _owner, _registered
    if _owner != os.getpid():  # a forked child that makes managers of its own
        _open.clear()
        _owner = os.getpid()
    _open.add(manager)
    if not _registered:
        _registered = True
        _register(_at_exit)
    if sigterm:
        _install()


def unwatch(manager: Watched) -> None:
    """Forget `manager`; after the last one the former SIGTERM handler is back."""
    _open.discard(manager)
    if not _open:
        _uninstall()


@contextmanager
def deferred() -> Iterator[None]:
    """What the main thread does in here is not interrupted by SIGTERM; a second SIGTERM does interrupt it."""
    global _busy, _late
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _busy += 1
    try:
        yield
    finally:
        _busy -= 1
        if _late and not _busy:
            _late = False
            _on_sigterm(signal.SIGTERM, None)


def _register(function: Any) -> None:
    """Run `function` when the main thread has ended and before threads are joined, as long as threads can be started.

    `atexit` comes after that, too late for a write that uses a thread pool; it is the fallback.
    """
    try:
        threading._register_atexit(function)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        atexit.register(function)


def _at_exit() -> None:
    if _owner == os.getpid():
        for manager in list(_open):
            manager._finish_at_exit()


def _install() -> None:
    global _previous
    if threading.current_thread() is not threading.main_thread() or _previous is not None:
        return
    if signal.getsignal(signal.SIGTERM) is not None:  # None: installed from C, can't be called from here
        _previous = signal.signal(signal.SIGTERM, _on_sigterm)


def _uninstall() -> None:
    """Only if nobody installed another one since: theirs may call ours."""
    global _previous
    if threading.current_thread() is not threading.main_thread() or _previous is None:
        return
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, _previous)
        _previous = None


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    global _late, _handling
    if _owner != os.getpid() or _handling or _late:  # not ours to write; or it is the second one: now
        _chain(number, frame)
        return
    if _busy:
        _late = True
        return
    _handling = True
    try:
        stays = [manager._stop() for manager in list(_open)]
        if any(stays):
            _call_previous(number, frame)
            return
        for manager in list(_open):
            manager._finish_at_exit()
    finally:
        _handling = False
    _chain(number, frame)


def _call_previous(number: int, frame: FrameType | None) -> bool:
    """True if there was a function to call."""
    if callable(_previous) and not isinstance(_previous, signal.Handlers):
        _previous(number, frame)
        return True
    return False


def _chain(number: int, frame: FrameType | None) -> None:
    """What would have happened without us: the former handler, or an end with the exit status of SIGTERM."""
    if _call_previous(number, frame) or _previous == signal.SIG_IGN:
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
