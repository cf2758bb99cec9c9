"""Runs `nanscan` commands, each in a fork of one process that has PyTorch already: in a terminal, or with files.

Importing PyTorch takes seconds, and a test of what a terminal shows has to run many commands. A command is real but for
its start and the end of its interpreter: a process and session of its own, its streams, `nanscan.cli.main()`.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
COLOUR = re.compile(r"\x1b\[(\d+;)*[349]\d[;m]")
PATIENCE = 120.0  # seconds: the machine may be busy


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str = ""

    @property
    def shown(self) -> list[str]:
        """The lines that stay on a terminal, without colours, cursor movements and what was drawn over."""
        lines = CONTROL.sub("", self.out.replace("\r\n", "\n")).split("\n")
        return [line.rpartition("\r")[2].rstrip() for line in lines]


class Server:
    """Starts commands."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)

    def _ask(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")

    def _answer(self) -> int:
        """The number of the process that was started, and after that its exit code."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        assert ready, "the command has not ended"
        return int(self._process.stdout.readline())

    @contextlib.contextmanager
    def _started(self, job: dict[str, Any]) -> Iterator[None]:
        """A command runs; it is killed if the block fails."""
        self._ask(job)
        child = self._answer()
        try:
            yield
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            self._answer()
            raise

    def run(self, folder: Path, *arguments: str, **environment: str) -> Done:
        """Run a command in ``folder`` whose stdout and stderr are files."""
        out, err = folder / ".stdout", folder / ".stderr"
        out.touch()
        err.touch()
        job = {"argv": arguments, "env": _environment(environment), "cwd": str(folder)}
        with self._started({**job, "streams": [str(out), str(err)]}):
            code = self._answer()
        done = Done(code, out.read_text(errors="surrogateescape"), err.read_text(errors="surrogateescape"))
        out.unlink()
        err.unlink()
        return done

    def terminal(
        self,
        folder: Path,
        *arguments: str,
        columns: int = 80,
        stop_at: str = "",
        piped: bool = False,
        **environment: str,
    ) -> Done:
        """Run a command in a terminal of so many columns; press Ctrl-C once it has shown ``stop_at``.

        With ``piped``, only stderr is the terminal, and stdout a file.
        """
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        name, out = os.ttyname(theirs), folder / ".stdout"
        if piped:
            out.touch()
        streams = [str(out) if piped else name, name]
        job = {"argv": arguments, "env": _environment({"TERM": "xterm-256color", **environment}), "cwd": str(folder)}
        try:
            with self._started({**job, "streams": streams}):
                text = self._watch(ours, stop_at)
                code = self._answer()
        finally:
            os.close(theirs)
            os.close(ours)
        return Done(code, out.read_text(), text) if piped else Done(code, text)

    def _watch(self, ours: int, stop_at: str) -> str:
        """All that the terminal shows until the command has ended."""
        assert self._process.stdout is not None
        seen, until, pressed = b"", time.monotonic() + PATIENCE, not stop_at
        while time.monotonic() < until:
            ready, _, _ = select.select([ours, self._process.stdout], [], [], 1.0)
            if ours in ready:
                seen += os.read(ours, 1 << 16)
                if not pressed and stop_at in CONTROL.sub("", seen.decode(errors="replace")):
                    os.write(ours, b"\x03")
                    pressed = True
            elif ready:  # the answer, and nothing more to read
                assert pressed, f"never showed {stop_at!r}: {seen!r}"
                return seen.decode(errors="replace")
        raise AssertionError(f"the command has not ended, stop_at {stop_at!r}: {seen!r}")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One for all tests of a worker."""
    started = Server()
    yield started
    started.close()


def _environment(others: dict[str, str]) -> dict[str, str]:
    left_out = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **others}


def _serve() -> None:
    import sklearn.datasets  # noqa: F401
    import torch  # noqa: F401

    import nanscan.bench
    import nanscan.cli.process
    import nanscan.demo
    import nanscan.files.model
    import nanscan.pickling.stream
    import nanscan.reporting.page
    import nanscan.reporting.reading

    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            _become(job)
            code = nanscan.cli.main()
            sys.stdout.flush()
            os._exit(code)
        print(child, flush=True)
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(job: dict[str, Any]) -> None:
    """Be the process that a shell would have started."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in enumerate(["/dev/null", *job["streams"]]):
        file = os.open(path, os.O_RDWR if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(job["env"])
    code = os.environ.get("PYTHONIOENCODING")
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", encoding=code), open(2, "w", 1, encoding=code)  # noqa: SIM115
    os.chdir(job["cwd"])
    sys.argv = ["nanscan", *job["argv"]]


if __name__ == "__main__":
    _serve()
