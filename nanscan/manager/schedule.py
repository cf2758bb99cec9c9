"""When a save is due: by steps, by seconds, or at every call. Decides; writes nothing."""

from __future__ import annotations

import math
import operator
import time
from typing import Any

__all__ = ["Schedule", "as_step", "positive_int"]


class Schedule:
    """Which calls of `CheckpointManager.save` save.

    Args:
        every_steps: steps that are a multiple of it are due; None: steps don't count.
        every_seconds: due when so many seconds have passed since the last save (or since this was made), by the
            monotonic clock; None: time doesn't count. With both, either suffices; with neither, every call is due.
    """

    def __init__(self, every_steps: int | None, every_seconds: float | None) -> None:
        self.every_steps = None if every_steps is None else positive_int("every_steps", every_steps)
        self.every_seconds = None if every_seconds is None else _seconds(every_seconds)
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """True if a save at `step` is due now."""
        if self.every_steps is None and self.every_seconds is None:
            return True
        if self.every_steps is not None and step % self.every_steps == 0:
            return True
        return self.every_seconds is not None and time.monotonic() - self._last >= self.every_seconds

    def saved(self) -> None:
        """A save was made: the seconds count from now."""
        self._last = time.monotonic()


def positive_int(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is smaller than `least`.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {type(value).__name__} {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def as_step(step: Any) -> int:
    """`step` as an int, at least 0."""
    return positive_int("step", step, least=0)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"every_seconds must be a number, got {type(value).__name__} {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"every_seconds must be a positive, finite number of seconds, got {value}")
    return float(value)
