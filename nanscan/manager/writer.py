"""The thread that writes snapshots while training goes on, with bounded memory and no lost errors."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from nanscan.manager.exits import deferred

__all__ = ["Writer"]

BUFFERS = 2  # one is being written, one waits
LINGER_SECONDS = 2.0  # an idle thread waits so long for more: starting one takes as long as copying a small state


class Job(NamedTuple):
    """One snapshot on its way to its file."""

    step: int
    snapshot: Any
    write: Callable[[int, Any], None]


class Writer:
    """Writes snapshots in order, one at a time, in a thread that ends a while after there is nothing more to write.

    The thread is no daemon: an interpreter that exits waits for it; `end` sends it home before. At most two snapshots
    exist, whose memory is used over and over: `take_buffer` waits while both are in use. In a forked child, where the
    thread does not exist, nothing is pending. Its owner is held only as long as there is something to write.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler of the main thread may wait here while the main thread holds it.
        self._changed = threading.Condition(threading.RLock())
        self._jobs: deque[Job] = deque()
        self._buffers: list[Any] = [None] * BUFFERS  # a stack: the second one is only ever filled if it is needed
        self._draining = threading.Lock()  # one at a time
        self._errors: deque[BaseException] = deque()
        self._thread: threading.Thread | None = None
        self._lingers = True
        self._pid = os.getpid()

    def take_buffer(self) -> Any:
        """A former snapshot to copy the next one into, or None; waits until there is one that nobody reads."""
        self._wait_until(lambda: bool(self._buffers))
        with self._changed:
            return self._buffers.pop()

    def give_back(self, buffer: Any) -> None:
        """Return a buffer that was taken and will not be submitted."""
        with self._changed:
            self._buffers.append(buffer)
            self._changed.notify_all()

    def submit(self, step: int, snapshot: Any, write: Callable[[int, Any], None]) -> None:
        """Have `write(step, snapshot)` called in the thread; the snapshot is in a buffer taken before."""
        with self._changed:
            self._jobs.append(Job(step, snapshot, write))
            self._changed.notify_all()
            if self._is_served():
                return
            self._thread = threading.Thread(target=self._serve, name="nanscan-checkpoint-writer", daemon=False)
            thread = self._thread
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter is about to exit: write it here
            self._drain()

    def wait(self) -> None:
        """Wait until everything submitted is written, or has failed."""
        if self._pid == os.getpid():
            self._wait_until(lambda: not self._jobs)

    def end(self) -> None:
        """`wait`, and let the thread end; a later `submit` starts another."""
        self.send_home()
        self.wait()

    def send_home(self) -> None:
        """Let the thread end as soon as everything is written."""
        if self._pid == os.getpid():
            with self._changed:
                self._lingers = False
                self._changed.notify_all()

    @property
    def pending(self) -> int:
        """How many snapshots are not written yet."""
        return len(self._jobs) if self._pid == os.getpid() else 0

    def next_error(self) -> BaseException | None:
        """The oldest error that nobody was told about, which is then forgotten; None if there is none."""
        with self._changed:
            return self._errors.popleft() if self._errors else None

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            while not reached() and self._is_served():
                self._changed.wait()
            if reached():
                return
        with deferred():
            self._drain()  # a `submit` was interrupted before its thread began

    def _is_served(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _serve(self) -> None:
        while self._has_work():
            self._drain()

    def _has_work(self) -> bool:
        """Wait a while for something to write; False after that, when the thread is not counted on any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or not self._lingers, LINGER_SECONDS)
            if not self._jobs:
                self._thread = None
            return bool(self._jobs)

    def _drain(self) -> None:
        with self._draining:
            while (job := self._next_job()) is not None:
                error: BaseException | None = None
                try:
                    job.write(job.step, job.snapshot)
                except BaseException as caught:
                    error = caught
                del job  # the thread may wait now, and must not hold the owner
                self._done(error)

    def _next_job(self) -> Job | None:
        with self._changed:
            return self._jobs[0] if self._jobs else None

    def _done(self, error: BaseException | None) -> None:
        with self._changed:
            self._buffers.append(self._jobs.popleft().snapshot)
            if error is not None:
                self._errors.append(error)
            self._changed.notify_all()
