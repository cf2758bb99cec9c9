"""Reads a log, whatever state it is in: what can be read is kept, and what can't is counted and said."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanscan.reporting.events import Event, event_of
from nanscan.reporting.lines import read_lines
from nanscan.reporting.values import as_int, as_mapping, as_text, number

__all__ = ["Log", "Reader", "Run", "read_log"]

NOTES = ("checkpoint", "rollback", "ranges", "out_of_range", "preflight", "end")
MAX_GAPS = 5
MAX_PROBLEMS = 20
SERIES = ("step", "norm", "clip_factor", "clip_limit", "loss", "loss_scale", "time")


@dataclass
class Run:
    """The steps of one process, column by column; a number that is missing or not finite is None.

    Attributes:
        id: as the lines give it, "" for those of older logs.
        facts: its environment, {} if the line that says it is missing.
        columns: name -> a value for each step.
        skipped: the rows of `columns` whose step was skipped.
        events: the steps on which something was wrong or was done.
        layers: (row, layer -> gradient norm), where they were noted.
        notes: kind -> lines that are no steps.
        missing: (first, last) of each row of steps that are not in the file.
        lines: number of the first and of the last line that is one of its steps.
        back_to: the step to which the same process went back afterwards, as to a checkpoint; None if it didn't.
    """

    id: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in SERIES})
    skipped: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    layers: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    notes: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {kind: [] for kind in NOTES})
    missing: list[tuple[int, int]] = field(default_factory=list)
    lines: tuple[int, int] = (0, 0)
    back_to: int | None = None

    @property
    def end(self) -> dict[str, Any] | None:
        """What its program wrote when it ended; None if it was killed, is still running, or didn't get to say so."""
        return self.notes["end"][-1] if self.notes["end"] else None

    @property
    def steps(self) -> int:
        """How many steps it holds."""
        return len(self.columns["step"])

    @property
    def last_step(self) -> int:
        """The number of the last one, -1 if there is none."""
        return self.columns["step"][-1] if self.steps else -1


@dataclass
class Log:
    """All that a file says.

    Attributes:
        path: where it lies.
        size: in bytes.
        runs: in the order in which they begin.
        problems: what was ignored or is missing, in words.
        foreign: there are lines, and not one of them is a log's.
    """

    path: Path
    size: int
    runs: list[Run]
    problems: list[str]
    foreign: bool = False

    @property
    def steps(self) -> int:
        """How many steps there are in all runs."""
        return sum(run.steps for run in self.runs)


def read_log(path: Path) -> Log:
    """Read a log from the disk.

    Raises:
        OSError: it can't be read.
    """
    reader = Reader()
    for line in read_lines(path, reader.complain):
        reader.feed(line)
    return Log(path, path.stat().st_size, reader.runs, reader.problems(), reader.is_foreign)


class Reader:
    """Takes a log line by line.

    Attributes:
        runs: in the order in which they begin.
        note: the last line that was taken, if it is no step but a checkpoint, a rollback or the like; else None.
    """

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.note: dict[str, Any] | None = None
        self._said: list[str] = []
        self._count = 0
        self._by_id: dict[str, Run] = {}
        self._ignored: Counter[str] = Counter()
        self._half = False
        self._early: list[dict[str, Any]] = []  # lines that belong to a run and come before its first step

    def feed(self, line: bytes) -> Run | None:
        """Take one line; returns the run that it was a step of, None if it was no step."""
        self._half = not line.endswith(b"\n")
        self._count += 1
        self.note = None
        if not line.strip():
            return None
        try:
            data = json.loads(line.decode("utf-8", "replace").lstrip("\ufeff\0"))
        except (ValueError, RecursionError):
            self._ignored["cut" if self._half and line.lstrip().startswith(b"{") else "no JSON"] += 1
            return None
        if not isinstance(data, dict):
            self._ignored["foreign"] += 1
            return None
        return self._take(data)

    def _take(self, data: dict[str, Any]) -> Run | None:
        if data.get("kind") in NOTES:
            self.note = data
            self._note(data)
            return None
        step = as_int(data.get("step"))
        if step is None or "norm" not in data:
            self._ignored["foreign"] += 1
            return None
        run = self._run_of(data, step)
        if run.steps and step > run.last_step + 1:
            run.missing.append((run.last_step + 1, step - 1))
        self._add(run, step, data)
        return run

    def _run_of(self, data: dict[str, Any], step: int) -> Run:
        name = str(data.get("run_id", ""))
        run = self._by_id.get(name)
        back = run is not None and (step < run.last_step or (step == run.last_step and not name))
        if run is None or back or "run" in data:
            facts = data.get("run", run.facts if run is not None and name else None)  # back: the process went on
            if run is not None and name and "run" not in data:
                run.back_to = step
            run = self._by_id[name] = Run(name, as_mapping(facts))
            run.lines = (self._count, self._count)
            self.runs.append(run)
            self._file_early(run)
        run.lines = (run.lines[0], self._count)
        return run

    def _file_early(self, run: Run) -> None:
        early, self._early = self._early, []
        for note in early:
            other = note["kind"] == "preflight" and note.get("run_id", run.id) != run.id
            self._early.append(note) if other else self._file(run, note)

    def _add(self, run: Run, step: int, data: dict[str, Any]) -> None:
        row = run.steps
        run.columns["step"].append(step)
        for name in SERIES[1:]:
            run.columns[name].append(number(data.get(name)))
        if data.get("skipped") is True:
            run.skipped.append(row)
        event = event_of(row, step, data)
        if event is not None:
            run.events.append(event)
        if isinstance(data.get("layer_norms"), dict):
            norms = {as_text(name): number(value, finite=False) for name, value in data["layer_norms"].items()}
            run.layers.append((row, {name: value for name, value in norms.items() if value is not None}))

    def _note(self, data: dict[str, Any]) -> None:
        run = self._by_id.get(str(data.get("run_id", "")))
        if run is None and self.runs and data["kind"] != "preflight":  # that comes before the first step of its run
            run = self.runs[-1]
        if run is None:
            self._early.append(data)
        else:
            self._file(run, data)

    @staticmethod
    def _file(run: Run, data: dict[str, Any]) -> None:
        run.notes[data["kind"]].append({**data, "row": max(0, run.steps - 1)})

    @property
    def is_foreign(self) -> bool:
        """True if there are lines, and not one of them is a log's; one that is still being written does not count."""
        return not (self.runs or self._early) and self._ignored["no JSON"] + self._ignored["foreign"] > 0

    def complain(self, text: str) -> None:
        """Add to the problems."""
        self._said.append(text)

    def problems(self) -> list[str]:
        """What was ignored or is missing, in words."""
        said = [*self._of_lines(), *self._said, *self._of_runs()]
        more = [f"And {len(said) - MAX_PROBLEMS} more of this kind."] if len(said) > MAX_PROBLEMS else []
        return [*said[:MAX_PROBLEMS], *more]

    def _of_lines(self) -> Iterator[str]:
        counts = self._ignored
        if counts["cut"]:
            yield "The last line is cut off and was ignored: the program was stopped in it, or is writing it now."
        if counts["no JSON"]:
            yield f"{_lines(counts['no JSON'])} no JSON and ignored: half a line, or the output of another program."
        if counts["foreign"]:
            yield f"{_lines(counts['foreign'])} JSON but not a step of nanscan, and ignored."
        if self._early:
            yield f"{_lines(len(self._early))} of checkpoints, rollbacks or ranges, but there is no step."
        if not any(run.steps for run in self.runs):
            yield "There is no step in this log: it is empty, was just begun, or is another program's."

    def _mixed(self) -> str:
        ordered = all(a.lines[1] < b.lines[0] for a, b in zip(self.runs, self.runs[1:], strict=False))
        if ordered:
            return "it was continued, or started again, after the first one."
        return "several processes wrote into it at the same time, which is easier to read in a log for each."

    def _of_runs(self) -> Iterator[str]:
        if len(self.runs) > 1:
            yield f"The log holds {len(self.runs)} runs: {self._mixed()} They are shown one after the other."
        for index, run in enumerate(self.runs, 1):
            which = f"Run {index}: " if len(self.runs) > 1 else ""
            if run.missing:
                yield which + _gaps(run.missing)
            if run.columns["step"] and run.columns["step"][0] > 0 and not run.facts:
                yield f"{which}The steps begin at {run.columns['step'][0]}: the lines before are not in this file."
            if not run.facts and run.steps:
                yield f"{which}The environment is unknown: the line that says it is missing, or of an older version."


def _lines(count: int) -> str:
    return "1 line is" if count == 1 else f"{count:,} lines are"


def _gaps(missing: list[tuple[int, int]]) -> str:
    total = sum(last - first + 1 for first, last in missing)
    shown = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in missing[:MAX_GAPS])
    more = f" and {len(missing) - MAX_GAPS} more gaps" if len(missing) > MAX_GAPS else ""
    return f"{total:,} step{'' if total == 1 else 's'} missing in the log: {shown}{more}."
