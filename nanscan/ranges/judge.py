"""Which row left its range: the rules, and what they need to remember of earlier steps."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import repeat
from operator import gt

import torch

from nanscan.ranges.record import Key, StepRecord
from nanscan.ranges.row import OutOfRange
from nanscan.ranges.stats import Stats, limit_of, row_of

__all__ = ["Judge", "RmsHistory"]

FULL = 0.95  # of the largest number of a dtype
HALF_MAX = 65504.0
JUMP = 32.0  # times the median: five doublings, where the spread of one layer over healthy steps is within two
OVER_PEAK = 4.0
WINDOW, RECENT, ENOUGH = 32, 8, 8
BATCH = 16  # calm steps that wait to be remembered together
_ENGINES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # what the native engine measures
_MINIMA = {float(torch.finfo(d).min) for d in _ENGINES}


class RmsHistory:
    """The rms of one row over the steps; says when a new one is a sudden jump.

    A jump is more than 32 times the median of the last 32 (at least 8), and more than 4 times the largest that there
    ever was up to 8 steps ago. The latter keeps a gradient that has become small from raising an alarm when it returns
    to where it was, and "8 steps ago" lets a steady growth by a factor be seen.
    """

    def __init__(self) -> None:
        self.calm = math.inf  # up to here nothing is a jump
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._step = -1  # of the last one
        self._peak = 0.0  # of those that are no longer among the recent ones

    def jump(self, rms: float) -> str | None:
        """The reason if `rms` is a sudden jump, else None.

        >>> history = RmsHistory()
        >>> for step in range(8):
        ...     history.add(step, 0.5)
        >>> history.jump(2.0), history.jump(50.0)
        (None, 'jumped to rms 50, 100 times the median of its last 8 steps (0.5)')
        """
        if rms <= self.calm:
            return None
        median = statistics.median(self._window)
        if not 0.0 < JUMP * median < rms:
            return None
        n = len(self._window)
        return f"jumped to rms {rms:.4g}, {rms / median:.3g} times the median of its last {n} steps ({median:.4g})"

    def add(self, step: int, rms: float) -> None:
        """Remember the rms of a step; again for the same step: instead of what it was before."""
        window = self._window
        if step == self._step:
            window.pop()
        self._step = step
        window.append(rms)
        if len(window) > RECENT and window[-RECENT - 1] > self._peak:
            self._peak = window[-RECENT - 1]
        if len(window) >= ENOUGH:
            self.calm = OVER_PEAK * self._peak

    def extend(self, step: int, rms: Sequence[float]) -> None:
        """Remember the rms of several steps, the last of which is `step`; as `add` for each, but quicker."""
        have = len(self._window)
        seen = [*self._window, *rms]
        self._peak = max(self._peak, max(seen[max(0, have - RECENT) : max(0, len(seen) - RECENT)], default=0.0))
        self._step = step
        self._window.extend(rms)
        if len(seen) >= ENOUGH:
            self.calm = OVER_PEAK * self._peak


class CalmSteps:
    """Steps in which no row came near a jump: what they say waits until several can be remembered together.

    `RmsHistory.calm` only grows once it is finite, so that what lies below an old one lies below the present one too.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._histories: list[RmsHistory] = []
        self._calm: list[float] = []
        self._waiting: list[list[float]] = []
        self._step = -1  # of the last that waits

    def take(self, step: int, rows: list[int], rms: list[float]) -> bool:
        """Take a step with the rows that were expected, if all are calm; False: nothing was done."""
        if rows != self._rows or any(map(gt, rms, self._calm)):
            return False
        self._waiting.append(rms)
        self._step = step
        if len(self._waiting) >= BATCH:
            self.remember()
        return True

    def remember(self) -> None:
        """Bring the histories up to the present."""
        if self._waiting:
            for history, rms in zip(self._histories, zip(*self._waiting, strict=True), strict=True):
                history.extend(self._step, rms)
            self._waiting.clear()
            self._calm = [history.calm for history in self._histories]

    def expect(self, rows: list[int], histories: list[RmsHistory]) -> None:
        """The rows of the steps to come, in their order, and the history of each."""
        self._calm = [history.calm for history in histories]
        self._rows = rows if math.inf not in self._calm else []
        self._histories = histories


class Judge:
    """Names the first row that leaves its range, in the order in which rows were measured."""

    def __init__(self) -> None:
        self._history: dict[Key, RmsHistory] = {}
        self._calm = CalmSteps()
        self._masks: set[Key] = set()

    def first_bad(self, record: StepRecord) -> OutOfRange | None:
        """The first bad one of the record's fresh rows. All of them are remembered."""
        ordinary = record.take_ordinary(_BOUNDS)
        if ordinary is not None and self._calm.take(record.step, *ordinary):
            return None
        self._calm.remember()
        if ordinary is None:
            return self._look_at(record, _looked_at(record))
        rows, rms = ordinary
        keys = [record.keys[row] for row in rows]
        found = self._look_at(record, zip(keys, rms, repeat(None)))
        self._calm.expect(rows, [self._history[key] for key in keys])
        return found

    def _look_at(self, record: StepRecord, rows: Iterable[tuple[Key, float, str | None]]) -> OutOfRange | None:
        found: OutOfRange | None = None
        for key, rms, reason in rows:
            history = self._history.get(key)
            if history is None:
                history = self._history[key] = RmsHistory()
            if reason is None and rms > history.calm:
                reason = history.jump(rms)
            if reason is not None and found is None:
                found = self._blame(record, key, reason)
            if rms == rms:  # not NaN: something was finite
                history.add(record.step, rms)
        return found

    def accept(self, record: StepRecord) -> None:
        """The step ended well: activations that hold -Inf, and nothing worse, do so on purpose."""
        self._masks.update(key for key, stats in record.with_infs() if _only_negative_inf(key, stats))

    def _blame(self, record: StepRecord, key: Key, reason: str) -> OutOfRange:
        """The row at `key`; but where NaNs are from is a -Inf that came earlier in the step and is new."""
        stats = record.stats[key]
        if stats.nans or stats.infs:
            for earlier, other in record.stats.items():
                if earlier == key:
                    break
                if _only_negative_inf(earlier, other) and earlier not in self._masks:
                    key, stats, reason = earlier, other, _non_finite(other)
                    break
        row = row_of(record.step, *key, stats)
        return OutOfRange(**{f.name: getattr(row, f.name) for f in dataclasses.fields(row)}, reason=reason)


def _looked_at(record: StepRecord) -> Iterator[tuple[Key, float, str | None]]:
    """Key, rms and, if it is out of bounds, the reason, of all that is fresh."""
    for key in record.take_fresh():
        stats = record.stats[key]
        bound, reason = _bound(stats.limit), None
        if stats.high > bound or stats.low < -bound or stats.nans or stats.infs:
            reason = _out_of_bounds(key, stats)
        yield key, stats.rms, reason


def _out_of_bounds(key: Key, stats: Stats) -> str | None:
    if (stats.nans or stats.infs) and not _only_negative_inf(key, stats):
        return _non_finite(stats)
    if stats.peak > _bound(stats.limit) and not _is_mask(key, stats):
        return _near_limit(stats)
    return None


@cache
def _bound(limit: float) -> float:
    return FULL * limit if limit < HALF_MAX else FULL * HALF_MAX


_BOUNDS = {name: _bound(limit) for name, limit in map(limit_of, _ENGINES)}


def _only_negative_inf(key: Key, stats: Stats) -> bool:
    """An activation as attention masks and padding leave it."""
    return key[1] == "activation" and stats.infs > 0 and stats.nans == 0 and stats.positive_infs == 0


def _is_mask(key: Key, stats: Stats) -> bool:
    """Whether the largest magnitude is a constant such as -1e9 or the dtype's minimum, as finite masks have it."""
    if key[1] != "activation" or stats.high > _bound(stats.limit):
        return False
    dtype = getattr(torch, stats.dtype)
    if not dtype.is_floating_point or stats.low in _MINIMA:
        return stats.low in _MINIMA
    powers = torch.tensor([-(10.0**n) for n in range(5, 39)], dtype=torch.float64, device="cpu").to(dtype).tolist()
    return stats.low in powers


def _non_finite(stats: Stats) -> str:
    return f"non-finite: {stats.nans} NaN, {stats.infs} Inf of {stats.numel}"


def _near_limit(stats: Stats) -> str:
    largest = max(stats.low, stats.high, key=abs)
    if stats.peak > FULL * stats.limit:
        return f"reaches {largest:.5g}, beyond {FULL:.0%} of {stats.dtype}'s maximum ({stats.limit:.5g})"
    return f"reaches {largest:.5g} in {stats.dtype}, beyond {FULL:.0%} of float16's maximum ({HALF_MAX:g})"
