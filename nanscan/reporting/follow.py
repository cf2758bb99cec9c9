"""A log that grows: what came since the last look, in one line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from nanscan.reporting.reading import Reader, Run

__all__ = ["Batch", "Tail"]

CHUNK = 1 << 20


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
        all_skipped: how many were skipped since the log began.
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

    def __add__(self, other: Batch) -> Batch:
        if not other.steps and not other.trouble:
            return self
        return replace(
            other,
            steps=self.steps + other.steps,
            skipped=self.skipped + other.skipped,
            seconds=self.seconds + other.seconds,
            norm=self.norm if other.norm is None else other.norm,
            loss=self.loss if other.loss is None else other.loss,
            trouble=other.trouble or self.trouble,
        )

    def __bool__(self) -> bool:
        return self.steps > 0

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
    """Reads what was appended to a file since the last time, whole lines only; begins again where it was truncated.

    Args:
        path: of the log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._at = 0
        self._rest = b""
        self._reader = Reader()
        self._before: float | None = None

    def read(self) -> Batch:
        """What came; an empty batch if nothing did.

        Raises:
            OSError: the file can't be read.
        """
        if self._path.stat().st_size < self._at:
            self._begin()
        batch = Batch()
        with self._path.open("rb") as file:
            file.seek(self._at)
            while chunk := file.read(CHUNK):
                self._at += len(chunk)
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for line in lines:
                    batch += self._take(line + b"\n")
        return batch

    def _take(self, line: bytes) -> Batch:
        run = self._reader.feed(line)
        if run is None:
            return Batch()
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

    def _passed(self, run: Run) -> float:
        now = run.columns["time"][-1]
        passed = 0.0 if now is None or self._before is None else max(0.0, now - self._before)
        self._before = now
        return passed
