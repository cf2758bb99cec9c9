"""A log that grows: what came since the last look, in one line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanscan.reporting.reading import Reader, Run
from nanscan.reporting.timeline import of_note
from nanscan.reporting.values import as_text, number

__all__ = ["Batch", "News", "NoLog", "Tail"]

CHUNK = 1 << 20
TOLD = ("rollback", "checkpoint", "out_of_range", "end")


class NoLog(Exception):
    """There are lines in the file, and not one of them is a log's."""


@dataclass(frozen=True)
class News:
    """Something beside the steps, in a line: a checkpoint, a rollback, the end.

    Attributes:
        text: the line.
        bad: whether it is trouble.
        end: whether the run that wrote the last step is over.
    """

    text: str
    bad: bool = False
    end: bool = False


@dataclass(frozen=True)
class Batch:
    """Some steps in a row, as one line says them.

    Attributes:
        steps: how many.
        skipped: how many of them were skipped.
        last: the number of the last one; -1 if there is none.
        norm: the last finite gradient norm, None if there is none.
        loss: the last finite loss that was observed.
        clip_factor: of the last step.
        seconds: from the first of them to the last.
        trouble: what was wrong at the last step on which something was, "" if nothing was.
        all_skipped: how many were skipped since the run began, in this file.
        news: what else happened, in order.
    """

    steps: int = 0
    skipped: int = 0
    last: int = -1
    norm: float | None = None
    loss: float | None = None
    clip_factor: float | None = None
    seconds: float = 0.0
    trouble: str = ""
    all_skipped: int = 0
    news: tuple[News, ...] = ()

    def __add__(self, other: Batch) -> Batch:
        if not other.steps:
            return replace(self, news=self.news + other.news)
        return replace(
            other,
            steps=self.steps + other.steps,
            skipped=self.skipped + other.skipped,
            seconds=self.seconds + other.seconds,
            norm=self.norm if other.norm is None else other.norm,
            loss=self.loss if other.loss is None else other.loss,
            trouble=other.trouble or self.trouble,
            news=self.news + other.news,
        )

    def __bool__(self) -> bool:
        return self.steps > 0 or bool(self.news)

    @property
    def urgent(self) -> bool:
        """True if it is to be told at once."""
        return bool(self.trouble) or any(item.bad or item.end for item in self.news)

    @property
    def ended(self) -> bool:
        """True if the run is over, and no other has begun."""
        return bool(self.news) and self.news[-1].end

    def describe(self) -> str:
        """One line.

        >>> Batch(steps=20, last=119, norm=0.51234, loss=2.25, clip_factor=1.0, seconds=4.0).describe()
        'step 119  norm 0.5123  loss 2.25  5 steps/s  none skipped'
        """
        parts = [f"step {self.last}"]
        parts += [f"norm {self.norm:.4g}"] if self.norm is not None else []
        parts += [f"loss {self.loss:.4g}"] if self.loss is not None else []
        parts += [f"clipped x{self.clip_factor:.3g}"] if self.clip_factor is not None and self.clip_factor < 1 else []
        parts += [f"{self.steps / self.seconds:.3g} steps/s"] if self.seconds > 0 and self.steps > 1 else []
        parts += [f"{self.all_skipped} skipped so far" if self.all_skipped else "none skipped"]
        parts += [f"! {self.trouble}"] if self.trouble else []
        return "  ".join(parts)


class Tail:
    """Reads what was appended to a file since the last time, whole lines only.

    Begins again where the file was truncated, or replaced by another of its name; one that isn't there is waited for.

    Args:
        path: of the log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin(0)

    def _begin(self, file: int) -> None:
        self._file = file
        self._at = 0
        self._rest = b""
        self._reader = Reader()
        self._before: float | None = None

    def read(self) -> Batch:
        """What came; an empty batch if nothing did.

        Raises:
            OSError: the file is there and can't be read.
            NoLog: it is something else.
        """
        try:
            about = self._path.stat()
        except FileNotFoundError:
            return Batch()
        batch = Batch()
        if about.st_ino != self._file or about.st_size < self._at:
            if self._at:
                batch += Batch(news=(News("the file was replaced or emptied: it is read from its beginning"),))
            self._begin(about.st_ino)
        return batch + self._read_on()

    def _read_on(self) -> Batch:
        batch = Batch()
        with self._path.open("rb") as file:
            file.seek(self._at)
            while chunk := file.read(CHUNK):
                self._at += len(chunk)
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for line in lines:
                    batch += self._take(line + b"\n")
        if self._reader.is_foreign:
            raise NoLog
        return batch

    def _take(self, line: bytes) -> Batch:
        run = self._reader.feed(line)
        if run is not None:
            return self._step(run)
        note = self._reader.note
        return Batch(news=(self._news(note),)) if note is not None and note["kind"] in TOLD else Batch()

    def _step(self, run: Run) -> Batch:
        event = run.events[-1] if run.events and run.events[-1].row == run.steps - 1 else None
        column = run.columns
        return Batch(
            steps=1,
            skipped=int(bool(run.skipped) and run.skipped[-1] == run.steps - 1),
            last=run.last_step,
            norm=column["norm"][-1],
            loss=column["loss"][-1],
            clip_factor=column["clip_factor"][-1],
            seconds=self._passed(run),
            trouble="" if event is None else f"step {event.step} {event.title}",
            all_skipped=len(run.skipped),
        )

    def _news(self, note: dict[str, Any]) -> News:
        kind = note["kind"]
        if kind == "end":
            return self._end(note)
        if kind == "out_of_range":
            where = f"{as_text(note.get('tensor'))} of {as_text(note.get('module'))}"
            return News(
                f"step {as_text(note.get('step'))} out of range: {where}: {as_text(note.get('reason'))}", bad=True
            )
        if kind == "rollback":
            return News(f"rolled {of_note(kind, note)}", bad=True)
        if note.get("error"):
            return News(f"{of_note(kind, note)}: {as_text(note['error'])}", bad=True)
        seconds = number(note.get("seconds"))
        took = "" if seconds is None else f" in {seconds:.3g} s"
        return News(f"{of_note(kind, note)} saved{took}: {as_text(note.get('path'))}")

    def _end(self, note: dict[str, Any]) -> News:
        last = max(self._reader.runs, key=lambda run: run.lines[1], default=None)
        mine = last is None or str(note.get("run_id", "")) == last.id
        steps = f"after {(count := as_text(note.get('steps')))} step{'' if count == '1' else 's'}"
        error = as_text(note.get("error")).replace(": nanscan: ", ": ", 1)[:200]
        return News(f"ended {steps}" + (f": {error}" if error else ""), bad=bool(error), end=mine)

    def _passed(self, run: Run) -> float:
        now = run.columns["time"][-1]
        passed = 0.0 if now is None or self._before is None else max(0.0, now - self._before)
        self._before = now
        return passed
