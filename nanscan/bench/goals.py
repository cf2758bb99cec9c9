"""What the measured figures are held against. A goal is printed beside its figure, never asserted."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GOALS", "STEP_OVERHEAD", "CLIP_ADVANTAGE", "EXTRA_BYTES", "GATHER", "Goal", "cell", "step_bound"]


@dataclass(frozen=True)
class Goal:
    """A bound on a figure.

    Example:
        >>> Goal(at_least=60.0).verdict(61.3), Goal(at_most=80.0).verdict(93.0)
        ('ok', 'short')
    """

    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        above = self.at_least is None or value >= self.at_least
        return above and (self.at_most is None or value <= self.at_most)

    def verdict(self, value: float) -> str:
        return "ok" if self.met(value) else "short"

    def __str__(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"


def _row(loop: float, foreach: float, limit: float | None) -> dict[str, Goal]:
    goals = {"loop": Goal(loop), "foreach": Goal(foreach), "scaler": Goal(1.0)}
    return goals if limit is None else {**goals, "limit": Goal(limit)}


# Ratios of a peer's time to ours (loop, foreach, scaler), and the fraction of the read limit, in fp32.
GOALS: dict[str, dict[str, Goal]] = {
    "small": _row(60.0, 12.0, None),
    "lora": _row(28.0, 3.2, 0.95),
    "mlp": _row(60.0, 11.0, None),
    "resnet50": _row(16.0, 1.45, 0.95),
    "bert": _row(21.0, 1.22, 0.95),
    "gpt2": _row(19.0, 1.22, 0.95),
}

GATHER = Goal(at_most=80.0)  # ns per tensor, to read the list of gradients
STEP_OVERHEAD = Goal(at_most=1.0)  # of what a guarded, unclipped step may add to a bare one: see step_bound
CLIP_ADVANTAGE = Goal(at_least=8.0)  # the loop's clipping cost over ours, each as the difference to a bare step
EXTRA_BYTES = {"tensor": 64, "chunk": 16}  # of memory that one scan may take


def step_bound(flat_read: float, tensors: int) -> float:
    """Seconds that a guarded, unclipped step may add to a bare one.

    Args:
        flat_read: seconds of the fastest read of one flat buffer of the gradients' bytes.
        tensors: number of gradients.

    Example:
        >>> round(step_bound(flat_read=1e-3, tensors=160) * 1e6)  # microseconds
        1176
    """
    return 1.15 * flat_read + 100e-9 * tensors + 10e-6


def goals_for(row: str, dtype: str) -> dict[str, Goal]:
    """The goals of one row of the scan table; in half precision only "no peer is faster" and the read limit hold."""
    goals = GOALS[row]
    if dtype == "float32":
        return goals
    return {name: goal if name == "limit" else Goal(1.0) for name, goal in goals.items()}


def cell(value: float | None, goal: Goal | None = None, digits: int = 2) -> str:
    """A figure with its goal and verdict, for a table.

    Example:
        >>> cell(61.3, Goal(60.0), digits=1), cell(0.931, Goal(0.95)), cell(4.0), cell(None)
        ('61.3 (≥ 60 ok)', '0.93 (≥ 0.95 short)', '4.00', '–')
    """
    if value is None:
        return "–"
    text = f"{value:.{digits}f}"
    return text if goal is None else f"{text} ({goal} {goal.verdict(value)})"
