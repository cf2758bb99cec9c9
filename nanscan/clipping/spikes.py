"""What counts as a spike: a norm or a loss more than k deviations above its exponential mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nanscan.clipping.checked_state import count_of, number_of
from nanscan.clipping.record import Spike

__all__ = ["SpikeDetector", "Tracker"]

KEEP = 0.98  # the part of the old mean that stays: the last 50 steps count most
WARMUP = 30  # steps: so many give mean and deviation before anything is judged
LEAST_LOG_SIGMA = 0.15  # so that 6 sigma are a factor of 2.5 at least, however calm a run is
LEAST_SIGMA = 0.15  # likewise relative to the mean, where there are no logarithms
NEW_LEVEL = 10  # spikes in a row: then it is no spike, the run has another level


class Moments:
    """An exponential mean and variance that begin as the plain ones.

    The variance is that about the moving mean (West 1979, "Updating mean and variance estimates", for weights that
    fall by `KEEP` with each step).
    """

    __slots__ = ("mean", "variance")

    def __init__(self, mean: float = 0.0, variance: float = 0.0) -> None:
        self.mean = mean
        self.variance = variance

    def enter(self, value: float, count: int) -> None:
        """Take in the `count`-th value."""
        weight = max(1.0 / count, 1.0 - KEEP)
        distance = value - self.mean
        self.mean += weight * distance
        self.variance = (1.0 - weight) * (self.variance + weight * distance * distance)


class Tracker:
    """The recent history of one number, and the limit that it gives.

    It is judged by its logarithm, as norms and losses vary by factors; a loss that is not always positive, by itself.
    What enters is held within the limit on either side, so that one spike does not hide the next ones.

    Args:
        what: `"norm"` or `"loss"`.
        sigma: how many deviations above the mean are a spike.

    >>> tracker = Tracker("norm", 6.0)
    >>> for _ in range(WARMUP):
    ...     tracker.enter(2.0)
    >>> tracker.judge(4.0, "warn"), round(tracker.judge(20.0, "warn").limit, 2)
    (None, 4.92)
    """

    def __init__(self, what: str, sigma: float) -> None:
        self.what = what
        self.sigma = sigma
        self._start_over()

    def _start_over(self) -> None:
        self._count = 0
        self._in_a_row = 0  # spikes
        self._positive = True
        self._plain = Moments()
        self._log = Moments()

    def limit(self) -> float:
        """The value from which on it is a spike; inf in the warm-up."""
        if self._count < WARMUP:
            return math.inf
        if self._positive:
            return _exp(self._log.mean + self.sigma * self._log_sigma())
        return self._plain.mean + self.sigma * self._plain_sigma()

    def judge(self, value: float, action: str) -> Spike | None:
        """The spike that this value is, else None; it does not enter."""
        limit = self.limit()
        if not value > limit:
            return None
        if self._positive:
            mean, above = _exp(self._log.mean), (math.log(value) - self._log.mean) / self._log_sigma()
        else:
            mean = self._plain.mean
            above = (value - mean) / self._plain_sigma() if self._plain_sigma() else math.inf
        return Spike(self.what, value, mean, above, limit, action)

    def enter(self, value: float) -> None:
        """Take the value of a step in, also of one that was skipped because of it."""
        self._in_a_row = self._in_a_row + 1 if value > self.limit() else 0
        if self._in_a_row >= NEW_LEVEL:
            self._start_over()
        self._count += 1
        if value <= 0:
            self._positive = False
        judged = self._count > WARMUP
        if self._positive:
            reach = self.sigma * self._log_sigma() if judged else math.inf
            self._log.enter(_within(math.log(value), self._log.mean, reach), self._count)
        reach = self.sigma * self._plain_sigma() if judged else math.inf
        self._plain.enter(value if self._positive else _within(value, self._plain.mean, reach), self._count)

    def _log_sigma(self) -> float:
        return max(math.sqrt(self._log.variance), LEAST_LOG_SIGMA)

    def _plain_sigma(self) -> float:
        return max(math.sqrt(self._plain.variance), LEAST_SIGMA * abs(self._plain.mean))

    def state(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "count": self._count,
            "in_a_row": self._in_a_row,
            "positive": self._positive,
            "mean": self._plain.mean,
            "variance": self._plain.variance,
            "log_mean": self._log.mean,
            "log_variance": self._log.variance,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`.

        Raises:
            ValueError: if it is no such state.
        """
        count, in_a_row = count_of(state, "count"), count_of(state, "in_a_row")
        plain = Moments(number_of(state, "mean"), number_of(state, "variance"))
        log = Moments(number_of(state, "log_mean"), number_of(state, "log_variance"))
        if not isinstance(state.get("positive"), bool) or plain.variance < 0 or log.variance < 0:
            raise ValueError("positive must be a bool, and no variance negative")
        self._count, self._in_a_row, self._positive = count, in_a_row, state["positive"]
        self._plain, self._log = plain, log


class SpikeDetector:
    """The trackers of the norm and of the observed loss.

    Args:
        action: `"warn"`, `"clip"` or `"skip"`.
        sigma: see `nanscan.wrap`.
    """

    def __init__(self, action: str, sigma: float) -> None:
        self.action = action
        self.norm = Tracker("norm", sigma)
        self.loss = Tracker("loss", sigma)

    def judge(self, norm: float, loss: float | None) -> Spike | None:
        """The spike of this step, None if there is none; where both are one, that which is further out."""
        found = [self.norm.judge(norm, self.action) if norm > 0 else None]
        found.append(None if loss is None else self.loss.judge(loss, self.action))
        spikes = [spike for spike in found if spike is not None]
        return max(spikes, key=lambda spike: spike.sigma) if spikes else None

    def enter(self, norm: float, loss: float | None) -> None:
        """Take a step in: norms of exactly 0 (no gradients) and numbers that are not finite are left out."""
        if 0 < norm < math.inf:
            self.norm.enter(norm)
        if loss is not None and math.isfinite(loss):
            self.loss.enter(loss)

    def state(self) -> dict[str, Any]:
        """That of both trackers."""
        return {"norm": self.norm.state(), "loss": self.loss.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`; nothing is changed if it does not fit."""
        fresh = [Tracker(tracker.what, tracker.sigma) for tracker in (self.norm, self.loss)]
        for tracker in fresh:
            part = state.get(tracker.what)
            if not isinstance(part, Mapping):
                raise ValueError(f"{tracker.what} must be a dict, got {part!r}")
            tracker.load(part)
        self.norm, self.loss = fresh


def _within(value: float, mean: float, reach: float) -> float:
    return min(max(value, mean - reach), mean + reach)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
