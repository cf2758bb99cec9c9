"""What other parts write into the log of a guarded optimizer, beside its steps."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanscan.errors import NonFiniteError
from nanscan.log import JsonLog, logs_of

__all__ = ["Checkpoints", "note_rollback"]


class Checkpoints:
    """Notes each checkpoint, taken or refused, in the log of the optimizer that is saved with it."""

    def __init__(self) -> None:
        self._logs: list[weakref.ref[JsonLog]] = []

    def of(self, optimizer: Any) -> None:
        """Whose logs they are from now on; any object, noted nowhere if it has none."""
        self._logs = [weakref.ref(log) for log in logs_of(optimizer)]

    def _note(self, facts: dict[str, Any]) -> None:
        for log in self._logs:
            alive = log()
            if alive is not None:
                alive.note("checkpoint", facts)

    @contextmanager
    def saving(self, step: int, path: Path) -> Iterator[None]:
        """Around the writing of one checkpoint: notes how long it took, or why there is none."""
        started = time.perf_counter()
        facts: dict[str, Any] = {"step": step, "path": str(path)}
        try:
            yield
        except Exception as error:
            refused = isinstance(error, NonFiniteError)
            self._note({**facts, "error": str(error)[:2000], "refused": refused})
            raise
        self._note({**facts, "seconds": round(time.perf_counter() - started, 3), "bytes": _size(path)})


def _size(path: Path) -> int | None:
    """Of a file, or of all files of a folder (a sharded checkpoint); None if it is gone."""
    try:
        files = [entry for entry in os.scandir(path) if entry.is_file()] if path.is_dir() else [path]
        return sum(os.stat(file).st_size for file in files)
    except OSError:
        return None


def note_rollback(optimizer: Any, rollback: Any) -> None:
    """Note a `Rollback` in the log of a guarded optimizer.

    Args:
        optimizer: the guarded one, or None.
        rollback: what `Recovery` has recorded.
    """
    facts = rollback.to_dict()
    facts |= {"bad": [row["name"] for row in facts["bad"]][:50], "batches": [str(batch) for batch in facts["batches"]]}
    for log in logs_of(optimizer):
        log.note("rollback", facts)
