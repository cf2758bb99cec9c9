"""What was measured in one step, and the ring of the last steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from nanscan.engine.meter import RangeEntries
from nanscan.ranges.on_device import Pending, Transfer
from nanscan.ranges.stats import Stats, limit_of

__all__ = ["Key", "Ring", "StepRecord"]

Key = tuple[str, str]  # module, kind


class StepRecord:
    """The stats of one step by (module, kind), in the order in which they were first measured.

    What the engine's hooks measured stays with the engine until somebody reads it: objects for every tensor of every
    step would cost more than measuring them.

    Args:
        step: its number.
        keys: of the engine's rows.
        entries: where the engine's hooks put what they measure.
    """

    def __init__(self, step: int, keys: Sequence[Key] = (), entries: RangeEntries | None = None) -> None:
        self.step = step
        self.touched = True  # since it was last settled; the engine's hooks set this too
        self.entries = entries
        self.keys = keys
        self._stats: dict[Key, Stats] = {}
        self._fresh: list[Key] = []  # that were added to since they were last judged
        self._pending: list[tuple[Key, Pending]] = []
        self._transfers: list[tuple[list[Key], Transfer]] = []
        self._lock = threading.Lock()

    def add(self, key: Key, found: Stats | Pending) -> None:
        """Add a tensor to a row; autograd does this from its own threads."""
        with self._lock:
            if isinstance(found, Pending):
                self._pending.append((key, found))
            else:
                self._take_entries()
                self._merge(key, found)
            self.touched = True

    def _merge(self, key: Key, stats: Stats, fresh: bool = True) -> None:
        have = self._stats.get(key)
        self._stats[key] = stats if have is None else have + stats
        if fresh and key not in self._fresh[-1:]:
            self._fresh.append(key)

    def _take_entries(self) -> None:
        if self.entries is not None:
            for row, numbers, dtype, fresh in self.entries.take():
                self._merge(self.keys[row], Stats(*numbers, *limit_of(getattr(torch, dtype))), fresh)

    @property
    def stats(self) -> dict[Key, Stats]:
        """All that is there."""
        with self._lock:
            self._take_entries()
        return self._stats

    @property
    def fresh(self) -> bool:
        """Whether something was added since it was last judged."""
        return bool(self._fresh or (self.entries is not None and self.entries.fresh))

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

    def take_ordinary(self, bounds: Mapping[str, float]) -> tuple[list[int], list[float]] | None:
        """Row and rms of all that is fresh, which then isn't; None, with nothing changed, if that needs a closer look.

        Args:
            bounds: by dtype, the magnitude up to which a number raises no question.
        """
        if self.entries is None or self._stats:
            return None
        return self.entries.judge(bounds)

    def take_fresh(self) -> list[Key]:
        """The keys to judge, which are then no longer fresh."""
        with self._lock:
            self._take_entries()
            fresh, self._fresh = list(dict.fromkeys(self._fresh)), []
        return fresh

    def with_infs(self) -> Iterable[tuple[Key, Stats]]:
        """All stats if some of them may count an Inf, else none."""
        return self.stats.items() if self._stats or self.entries is None or self.entries.any_inf else ()


class Ring:
    """The records of the last `size` steps that were measured, oldest first."""

    def __init__(self, size: int) -> None:
        self._records: deque[StepRecord] = deque(maxlen=size)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(tuple(self._records))

    def touched(self) -> list[StepRecord]:
        """Those that something was added to since they were last settled: seldom more than one of them."""
        return [record for record in self._records if record.touched]

    def must_wait(self) -> bool:
        """Whether the next record would push one out whose numbers are still on a device."""
        return len(self._records) == self._records.maxlen and self._records[0].under_way

    def begin(self, step: int, keys: Sequence[Key] = (), entries: RangeEntries | None = None) -> StepRecord:
        """Start the record of a step."""
        self._records.append(StepRecord(step, keys, entries))
        return self._records[-1]
