"""Real processes in milliseconds: a server has everything imported and forks a child for each piece of code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]

_SERVER = r"""
import ctypes, gc, json, os, signal, sys

def _die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

_die_with_parent()
exec(compile(os.environ.pop("WARM_SETUP"), "setup", "exec"), globals())
gc.freeze()
print("ready", flush=True)
_back = sys.stdout
while _line := sys.stdin.readline():
    _job = json.loads(_line)
    _pid = os.fork()
    if _pid == 0:
        _die_with_parent()
        for _number, _name in ((1, _job["out"]), (2, _job["errors"])):
            os.dup2(os.open(_name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), _number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        break  # the child leaves the loop and becomes an ordinary program with an ordinary end
    print("pid", _pid, flush=True)
    print("status", os.waitstatus_to_exitcode(os.waitpid(_pid, 0)[1]), flush=True)
else:
    os._exit(0)
exec(compile(_job["code"], "child", "exec"), globals())
"""


class Child:
    """One forked process."""

    def __init__(self, server: Warm, pid: int, out: Path, errors: Path) -> None:
        self.pid = pid
        self._server = server
        self._out = out
        self._errors = errors

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; a child that has ended meanwhile is as good as killed."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit status, negative for the signal that ended it."""
        return self._server.status()

    def output(self) -> str:
        return self._out.read_text()

    def errors(self) -> str:
        return self._errors.read_text()

    def expect(self, text: str, seconds: float = 60.0) -> None:
        """Wait until the child has printed `text`."""
        end = time.monotonic() + seconds
        while text not in self.output():
            assert time.monotonic() < end, f"{text!r} not printed; {self.output()!r}; {self.errors()}"
            time.sleep(0.002)


class Warm:
    """The server; one child at a time.

    Args:
        setup: code that is run once, before any child is forked.
    """

    def __init__(self, setup: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0
        environment = {**os.environ, "WARM_SETUP": setup, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore::UserWarning", "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        assert self._line() == "ready"

    def fork(self, code: str) -> Child:
        """Start a child that runs `code` in the server's names."""
        self._count += 1
        out, errors = (Path(self._folder.name) / f"{self._count}.{kind}" for kind in ("out", "err"))
        out.touch()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"code": code, "out": str(out), "errors": str(errors)}) + "\n")
        self._process.stdin.flush()
        return Child(self, self._number("pid"), out, errors)

    def status(self) -> int:
        return self._number("status")

    def _number(self, kind: str) -> int:
        """The next of that kind; the status of a child that a failed test did not wait for is passed over."""
        while (words := self._line().split())[0] != kind:
            pass
        return int(words[1])

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the server has ended"
        return line

    def __enter__(self) -> Warm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
