"""Rows of a watched model in a step log, for `nanscan report`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nanscan.local_paths import refuse_other_places
from nanscan.log import JsonLog
from nanscan.ranges.record import StepRecord
from nanscan.ranges.row import OutOfRange
from nanscan.ranges.stats import row_of
from nanscan.reporting.facts import Rhythm

__all__ = ["RangeLog"]

DIGITS = 5
MAX_ROWS = 2000  # in one line


class RangeLog:
    """Appends a line of rows for some of the measured steps, and one for the first row out of range.

    Args:
        path: of the log.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        refuse_other_places(path, "log")
        self._log = JsonLog(path)
        self._measured = 0
        self._noted = -1

    def note_step(self, record: StepRecord) -> None:
        """Note a step that is over, if it is one of those that are kept; each once."""
        if record.step == self._noted or not record.stats:
            return
        self._noted = record.step
        due, self._measured = Rhythm.due(self._measured), self._measured + 1
        if due:
            rows = [row_of(record.step, *key, stats).to_dict() for key, stats in list(record.stats.items())[:MAX_ROWS]]
            self._log.note("ranges", {"step": record.step, "rows": [_short(row) for row in rows]})

    def note_bad(self, bad: OutOfRange) -> None:
        """Note the first row that left its range."""
        row = _short(bad.to_dict())
        tensor = row.pop("kind")
        self._log.note("out_of_range", {**row, "tensor": tensor})


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """5 digits of each number; the step is said once for all rows."""
    return {name: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value for name, value in row.items()}
