"""What was measured in one step, and the ring of the last steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from nanscan.ranges.on_device import Pending, Transfer
from nanscan.ranges.stats import Stats

__all__ = ["Key", "Ring", "StepRecord"]

Key = tuple[str, str]  # module, kind


class StepRecord:
    """The stats of one step by (module, kind), in the order in which they were first measured.

    Attributes:
        fresh: keys that were added to since they were last judged.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.stats: dict[Key, Stats] = {}
        self.fresh: list[Key] = []
        self._pending: list[tuple[Key, Pending]] = []
        self._transfers: list[tuple[list[Key], Transfer]] = []
        self._lock = threading.Lock()

    def add(self, key: Key, found: Stats | Pending) -> None:
        """Add a tensor to a row; autograd does this from its own threads."""
        with self._lock:
            if isinstance(found, Pending):
                self._pending.append((key, found))
            elif key in self.stats:
                self._merge(key, found)
            else:
                self.stats[key] = found
                self.fresh.append(key)

    def _merge(self, key: Key, stats: Stats) -> None:
        have = self.stats.get(key)
        self.stats[key] = stats if have is None else have + stats
        if key not in self.fresh[-1:]:
            self.fresh.append(key)

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to fetch and nothing to judge."""
        return not (self.fresh or self._pending or self._transfers)

    @property
    def under_way(self) -> bool:
        """Whether numbers are still on a device."""
        return bool(self._pending or self._transfers)

    def send(self) -> None:
        """Start to fetch what is on a device."""
        with self._lock:
            if self._pending:
                transfer = Transfer([found for _, found in self._pending])
                self._transfers.append(([key for key, _ in self._pending], transfer))
                self._pending = []

    def settle(self, wait: bool) -> bool:
        """Take in what was fetched; True if nothing is under way any more."""
        while self._transfers and (wait or self._transfers[0][1].ready()):
            keys, transfer = self._transfers.pop(0)
            found = transfer.get()
            with self._lock:
                for key, stats in zip(keys, found, strict=True):
                    self._merge(key, stats)
        return not self.under_way

    def take_fresh(self) -> list[Key]:
        """The keys to judge, which are then no longer fresh."""
        with self._lock:
            fresh, self.fresh = list(dict.fromkeys(self.fresh)), []
        return fresh


class Ring:
    """The records of the last `size` steps that were measured, oldest first."""

    def __init__(self, size: int) -> None:
        self._records: deque[StepRecord] = deque(maxlen=size)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(tuple(self._records))

    def must_wait(self) -> bool:
        """Whether the next record would push one out whose numbers are still on a device."""
        return len(self._records) == self._records.maxlen and self._records[0].under_way

    def begin(self, step: int) -> StepRecord:
        """Start the record of a step."""
        self._records.append(StepRecord(step))
        return self._records[-1]
