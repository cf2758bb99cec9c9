"""Hand samples that were taken interleaved to pytest-benchmark, which by itself times one command after the other.

The commands of a row are first timed against each other (``nanscan.bench.interleave``). Each command's samples then
go into pytest-benchmark's statistics, table and JSON through its own timer setting: the clock below stands still
except that every "call" moves it on by the next recorded sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class ReplayClock:
    """A clock that only recorded samples move.

    >>> clock = ReplayClock()
    >>> clock.load([0.5, 0.25])
    >>> clock.advance(); clock.now()
    0.5
    >>> clock.advance(); clock.now()
    0.75
    """

    def __init__(self) -> None:
        self._time = 0.0
        self._samples: Iterator[float] = iter(())

    def now(self) -> float:
        return self._time

    def load(self, samples: Sequence[float]) -> None:
        self._time, self._samples = 0.0, iter(samples)

    def advance(self) -> None:
        self._time += next(self._samples)


CLOCK = ReplayClock()


def record(benchmark: Any, samples: Sequence[float], **extra: Any) -> None:
    """Give one command's samples to pytest-benchmark; the test needs ``@pytest.mark.benchmark(timer=CLOCK.now)``."""
    benchmark.extra_info.update(extra)
    CLOCK.load(samples)
    benchmark.pedantic(CLOCK.advance, rounds=len(samples), iterations=1)
