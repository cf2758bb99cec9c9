"""AutoClip: the limit is a percentile of the norms so far (Seetharaman et al. 2020, arXiv:2007.14469)."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nanscan.clipping.checked_state import history_of

__all__ = ["AutoClip"]


class AutoClip:
    """The norms of a run, sorted.

    Args:
        percentile: from 0 to 100.
        window: how many of the last norms count; None: all.

    >>> rule = AutoClip(50.0)
    >>> for norm in (1.0, 3.0):
    ...     rule.enter(norm)
    >>> rule.limit(8.0)  # the median of 1, 3 and 8
    3.0
    """

    name = "autoclip"

    def __init__(self, percentile: float, window: int | None = None) -> None:
        self.percentile = percentile
        self.window = window
        self._sorted = array("d")
        self._order: deque[float] | None = None if window is None else deque()

    def limit(self, norm: float) -> float:
        """The limit of a step with this norm, which does not enter the history yet."""
        history = self._sorted
        oldest = self._leaving()
        if oldest is not None:
            history = history[:]
            del history[bisect_left(history, oldest)]
        return percentile_with(history, norm, self.percentile)

    def enter(self, norm: float) -> None:
        """The step with this norm was taken."""
        oldest = self._leaving()
        if self._order is not None:
            if oldest is not None:
                del self._sorted[bisect_left(self._sorted, self._order.popleft())]
            self._order.append(norm)
        insort(self._sorted, norm)

    def _leaving(self) -> float | None:
        """The norm that the next one pushes out of the window."""
        order = self._order
        return order[0] if order is not None and len(order) == self.window else None

    def state(self) -> dict[str, Any]:
        """The norms: oldest first ("ordered") where there is a window, else sorted."""
        norms = self._sorted if self._order is None else list(self._order)
        return {"norms": torch.tensor(norms, dtype=torch.float64, device="cpu"), "ordered": self._order is not None}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`.

        Raises:
            ValueError: if it is no such state.
        """
        norms = history_of(state, "norms")
        if self.window is not None and not state.get("ordered", True):
            norms = _spread(norms, self.window)
        self._order = None if self.window is None else deque(norms[-self.window :])
        self._sorted = array("d", sorted(norms if self._order is None else self._order))


def _spread(ordered: Sequence[float], count: int) -> list[float]:
    """So many of the sorted norms, evenly: nobody knows which were the last, and they stand for all."""
    last = len(ordered) - 1
    if count > last:
        return list(ordered)
    return [ordered[round((i + 0.5) / count * last)] for i in range(count)]


def percentile_with(ordered: Sequence[float], value: float, percentile: float) -> float:
    """The percentile of a sorted sequence and one more value, between two neighbours linearly (as NumPy's default).

    >>> percentile_with([1.0, 2.0, 4.0], 3.0, 50.0)
    2.5
    """
    at = bisect_left(ordered, value)

    def element(index: int) -> float:
        return value if index == at else ordered[index - (index > at)]

    place = percentile / 100 * len(ordered)
    below = min(math.floor(place), len(ordered))
    low, high = element(below), element(min(below + 1, len(ordered)))
    return low + (high - low) * (place - below)
