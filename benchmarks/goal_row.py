"""A row whose commands were timed against each other, and a ratio of them that has a goal."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from nanscan.bench import Timings
from nanscan.bench.goals import Goal

__all__ = ["GoalRow"]


@dataclass(frozen=True)
class GoalRow:
    """Median seconds of each command; `ratio` is what `goal` is about."""

    row: str
    rounds: int
    medians: dict[str, float]
    ratio: float
    goal: Goal
    timings: Timings = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in asdict(self).items() if name not in ("goal", "timings")}
        return plain | {"goal": str(self.goal), "verdict": self.goal.verdict(self.ratio)}
