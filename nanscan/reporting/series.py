"""Columns of numbers, thinned to what a screen can show: the smallest and the largest of each bucket stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanscan.reporting.reading import Run

__all__ = ["Axis", "picked", "rounded", "stretches", "thinned"]

BUCKETS = 5000  # of two points each


class Axis:
    """Where the steps of several runs lie on one axis: as numbered, where there is one run; else end to end.

    Attributes:
        starts: where each run begins.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.starts: list[int] = []
        self._steps = [run.columns["step"] for run in runs]
        at = self._steps[0][0] if len(runs) == 1 and runs[0].steps else 0
        for steps in self._steps:
            self.starts.append(at)
            at += steps[-1] - steps[0] + 1 if steps else 0

    def at(self, run: int, row: int) -> int:
        """The place of a run's row."""
        steps = self._steps[run]
        return self.starts[run] + steps[row] - steps[0] if steps else self.starts[run]

    def all(self) -> NDArray[np.int64]:
        """The places of all rows of all runs."""
        parts = [
            np.asarray(steps, np.int64) - steps[0] + start
            for steps, start in zip(self._steps, self.starts, strict=True)
            if steps
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def thinned(x: NDArray[np.int64], values: Sequence[float | None], buckets: int = BUCKETS) -> list[list[Any]]:
    """Pairs [x, value], at most two for each bucket: its smallest and largest, in order; None where there is none.

    >>> thinned(np.arange(6), [1.0, 5.0, 2.0, None, 0.5, 0.6], buckets=2)
    [[0, 1.0], [1, 5.0], [4, 0.5], [5, 0.6]]
    """
    y = np.array([np.nan if value is None else value for value in values], float)
    kept = picked(y, buckets)
    return [[int(a), rounded(b)] for a, b in zip(x[kept], y[kept], strict=True)]


def picked(y: NDArray[np.float64], buckets: int = BUCKETS) -> NDArray[np.int64]:
    """The rows that are kept."""
    if len(y) <= 2 * buckets:
        return np.arange(len(y))
    edges = np.linspace(0, len(y), buckets + 1).astype(np.int64)
    return np.unique(np.concatenate([_extremes(y[a:b]) + a for a, b in zip(edges, edges[1:], strict=False)]))


def _extremes(part: NDArray[np.float64]) -> NDArray[np.int64]:
    good = np.flatnonzero(~np.isnan(part))
    if not len(good):
        return np.array([0])
    return good[[part[good].argmin(), part[good].argmax()]]


def rounded(value: float) -> float | None:
    """5 digits, None for NaN: what is drawn needs no more."""
    return None if value != value else float(f"{value:.5g}")


def stretches(places: Sequence[int]) -> list[list[int]]:
    """[first, how many] of each row of neighbours; nothing is lost.

    >>> stretches([3, 4, 5, 9])
    [[3, 3], [9, 1]]
    """
    found: list[list[int]] = []
    for place in places:
        if found and place == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([place, 1])
    return found
