"""The processes that a pickle is tried in: a new interpreter, or a forked copy of this one. They only start and end."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import warnings
from typing import IO, Protocol

import torch

from nanscan.pickling import trial

__all__ = ["TRIAL", "ForkedProcess", "FreshProcess", "Process"]

TRIAL = "_nanscan_trial"  # the name in sys.modules by which a process knows that it is one of these


class Process(Protocol):
    """What both kinds of processes offer."""

    requests: IO[bytes]
    answers: IO[bytes]

    def kill(self) -> None: ...

    def end(self) -> int: ...


class FreshProcess:
    """A new interpreter. The program comes with the command line, so that its `__main__` stays empty."""

    def __init__(self, time_limit: float) -> None:
        path = [entry for entry in sys.path if isinstance(entry, str)]
        source = inspect.getsource(trial)
        run = f"{source}\nserve(*silence(), {time_limit!r})"
        begin = f"import sys; sys.path[:] = {path!r}; sys.modules[{TRIAL!r}] = None"
        program = f"{begin}; exec(compile({run!r}, '<nanscan>', 'exec'), {{'__name__': 'trial'}})"
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # its children go with it, and Ctrl-C comes to us alone
        )
        assert self._process.stdin and self._process.stdout
        self.requests: IO[bytes] = self._process.stdin
        self.answers: IO[bytes] = self._process.stdout

    def kill(self) -> None:
        """End it and what it started."""
        _kill(self._process.pid)

    def end(self) -> int:
        """Kill, close, wait; its exit code, negative for a signal."""
        self.kill()
        _close(self.requests, self.answers)
        return self._process.wait()


class ForkedProcess:
    """A copy of this process, for the classes that only this one knows. It touches no device and runs no thread."""

    def __init__(self, time_limit: float) -> None:
        theirs, ours = os.pipe(), os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about threads: one that holds a lock forever costs the time limit
            self._pid = os.fork()
        if self._pid == 0:
            os.setsid()
            _serve_forked(theirs[0], ours[1], (theirs[1], ours[0]), time_limit)
        os.close(theirs[0])
        os.close(ours[1])
        self.requests: IO[bytes] = os.fdopen(theirs[1], "wb")
        self.answers: IO[bytes] = os.fdopen(ours[0], "rb")

    def kill(self) -> None:
        """End it and what it started."""
        _kill(self._pid)

    def end(self) -> int:
        """Kill, close, wait; its exit code, negative for a signal."""
        self.kill()
        _close(self.requests, self.answers)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _serve_forked(source: int, target: int, others: tuple[int, int], time_limit: float) -> None:
    """Never returns: no `finally`, no exit handler and no buffer of the caller's runs a second time."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in others:
            os.close(descriptor)
        trial.discard_streams()
        sys.modules[TRIAL] = trial
        torch.set_num_threads(1)  # OpenMP's threads did not come along
        trial.serve(source, target, time_limit)
    finally:
        os._exit(0)


def _kill(pid: int) -> None:
    for kill in (getattr(os, "killpg", None), os.kill):
        if kill is not None:
            with contextlib.suppress(OSError):
                kill(pid, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


def _close(*streams: IO[bytes]) -> None:
    for stream in streams:
        with contextlib.suppress(OSError):  # what was still to be written finds nobody
            stream.close()
