"""JSON lines: one for each step, whole and on disk (as far as the system is concerned) before the next step begins."""

from __future__ import annotations

import atexit
import errno
import json
import os
import sys
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanscan.errors import NonFiniteWarning
from nanscan.local_paths import refuse_other_places
from nanscan.report import StepReport
from nanscan.report_json import strict
from nanscan.reporting.facts import Rhythm, layer_norms, run_facts

__all__ = ["JsonLog", "Log", "describe_run", "json_logs", "logs_of", "open_log"]

One = str | os.PathLike[str] | Callable[[StepReport], Any]
Log = One | Sequence[One]


_living: weakref.WeakSet[JsonLog] = weakref.WeakSet()


class JsonLog:
    """Appends one line of strict JSON for each step report to a file: totals and bad rows, not the whole table.

    Each line is one `write` to a file opened for appending, so that `tail -f` and a second process never see half a
    line. A forked or unpickled copy opens the file again. A disk that refuses a line costs one warning, not the run.

    Beside the fields of the report a line has `run_id`, the first one of each process `run` (versions, engine, devices,
    parameters, settings), and some have `layer_norms` (layer -> gradient norm): each of the first 256, then ever fewer,
    at most 1/128 of the run apart, and those of spikes. Other lines have a `kind`; the last one, `"end"`, says that the
    program has ended, and by which error. See docs/reports.md.

    Args:
        path: the file; missing folders are made, an existing file is continued.

    Attributes:
        settings: what the `run` of the first line says of the guard's options.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "run.jsonl")
    >>> log = JsonLog(path)
    >>> log(StepReport(True, 1.0, 1.0, 1.0, 0, 0, 4, (), (), step=7))
    >>> StepReport.from_dict(__import__("json").loads(open(path).read())).step
    7
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._fd: int | None = None
        self._pid = 0
        self._warned = False
        self._steps = 0
        self._ended = False
        self._begin()
        self._open()  # a path that can't be written is the caller's mistake: now, not at step 5,000

    def __call__(self, report: StepReport) -> None:
        more = {"run_id": self._run_id, **self._more(report)}
        self._append(report.to_json(tensors=False)[:-1] + ", " + json.dumps(strict(more), allow_nan=False)[1:])

    def note(self, kind: str, facts: dict[str, Any]) -> None:
        """Append a line that is no step: a checkpoint, a rollback, ranges.

        Args:
            kind: which of these it is.
            facts: plain data.
        """
        line = {"kind": kind, "time": time.time(), "run_id": self._run_id, **facts}
        self._append(json.dumps(strict(line), allow_nan=False, default=str))

    def end(self, error: BaseException | None = None) -> None:
        """Append the line that says that the run is over; once, and only if there was a step.

        Args:
            error: what ended the program, None if nothing did.
        """
        if self._steps and not self._ended and self._fd is not None and self._pid == os.getpid():
            self._ended = True
            self.note("end", {"steps": self._steps, "error": None if error is None else _said(error)})

    def _begin(self) -> None:
        self._run_id = uuid.uuid4().hex[:8]
        self._told = False
        self._ended = False
        self._steps = 0
        _living.add(self)
        self.settings: dict[str, Any] = {}

    def _more(self, report: StepReport) -> dict[str, Any]:
        """What this line says beside its report."""
        more: dict[str, Any] = {}
        if not self._told:
            self._told = True
            more["run"] = run_facts(report, self.settings)
        if Rhythm.due(self._steps) or report.spike is not None:
            more["layer_norms"] = layer_norms(report)
        self._steps += 1
        return more

    def _append(self, text: str) -> None:
        line = (text + "\n").encode()
        try:
            if self._fd is None or self._pid != os.getpid():
                self._open()
            self._write(line)
        except OSError as error:
            self._complain(error)

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._fd is not None:  # in a forked child it is the child's own copy
            os.close(self._fd)
        self._fd = None

    def _open(self) -> None:
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "log= is a folder: give a file, such as run.jsonl", str(self.path))
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._pid = os.getpid()

    def _write(self, line: bytes) -> None:
        assert self._fd is not None
        while line:
            line = line[os.write(self._fd, line) :]

    def _complain(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            text = (
                f"nanscan: the step log {self.path} can't be written ({error}); training goes on without these lines."
            )
            warnings.warn(text, NonFiniteWarning, stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_fd": None, "_pid": 0, "_warned": self._warned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> JsonLog:
        return self

    def __del__(self) -> None:
        self.end()
        self.close()


class Logs:
    """Several logs as one: each gets every report, also where another one has raised.

    Args:
        logs: paths and functions.

    >>> seen = []
    >>> Logs([seen.append, seen.append])("report"); seen
    ['report', 'report']
    """

    def __init__(self, logs: Sequence[One]) -> None:
        self.logs = [log if callable(log) else JsonLog(log) for log in logs]

    def __call__(self, report: StepReport) -> None:
        raised: list[Exception] = []
        for log in self.logs:
            try:
                log(report)
            except Exception as error:
                raised.append(error)
        if raised:
            raise raised[0]


def open_log(log: Log | None) -> Callable[[StepReport], Any] | None:
    """What is called with each step report: None for no log, the function itself, a `JsonLog` for a path, or `Logs`.

    Raises:
        TypeError: if it is neither a path nor callable, nor a list or tuple of these.
        ValueError: if the path begins with ``~`` or is a URL.
        OSError: if the path can't be written.
    """
    if log is None or callable(log):
        return log
    several: list[Any] = list(log) if isinstance(log, (list, tuple)) else [log]
    wrong = [one for one in several if not callable(one) and not isinstance(one, (str, os.PathLike))]
    if wrong:
        raise TypeError(f"log must be a path or a function of the StepReport, got {wrong[0]!r}; give several as a list")
    for one in several:
        if not callable(one):
            refuse_other_places(one, "log")
    return Logs(several) if isinstance(log, (list, tuple)) else JsonLog(several[0])


def describe_run(log: Callable[[StepReport], Any] | None, settings: dict[str, Any]) -> None:
    """Let the first line of each JSON log say how the run was set up.

    Args:
        log: what `open_log` returned.
        settings: plain data.
    """
    for one in json_logs(log):
        one.settings = settings


def json_logs(log: Any) -> list[JsonLog]:
    """The JSON logs among what `open_log` returned."""
    several = log.logs if isinstance(log, Logs) else [log]
    return [one for one in several if isinstance(one, JsonLog)]


def _said(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}"[:2000]


@atexit.register
def _end_all() -> None:
    """The program is over: each log that was written says so, and what has ended it, if that was an error."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # in a shell it may be of long ago
    for log in list(_living):
        log.end(error)


def logs_of(optimizer: Any) -> list[JsonLog]:
    """The JSON logs of a guarded optimizer; none of any other object."""
    record = vars(optimizer).get("_record") if hasattr(optimizer, "__dict__") else None
    return json_logs(getattr(record, "listener", None))
