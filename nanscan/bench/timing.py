"""Timing several commands against each other: interleaved, in random order, so that none has the better moment.

A fixed order lets a command inherit the caches, clocks and spinning threads that its neighbour leaves behind; on a
two-core machine that made overheads wrong by a factor of ten. Here every round runs every command once, in an order
drawn anew, and what is compared are medians over the rounds: of the times, or of the differences within a round. A
command shorter than ``block`` seconds is repeated within its turn until the turn lasts that long, so that the clock's
own cost does not count.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Command", "Plan", "Timings", "interleave", "wall_clock"]

Command = Callable[[], object]


def wall_clock(command: Command, repeats: int) -> float:
    """Seconds per call of so many calls in a row."""
    calls = range(repeats)
    start = time.perf_counter()
    for _ in calls:
        command()
    return (time.perf_counter() - start) / repeats


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Args:
        seconds: stop after this much time, once ``min_rounds`` are done.
        min_rounds, max_rounds: bounds on the number of rounds.
        block: shortest turn of one command, in seconds; shorter commands are repeated. 0: never repeat.
        prepare: run before each turn, untimed (it must treat all commands alike); implies ``block=0``.
        timer: calls a command so many times and returns seconds per call; another one where work is asynchronous.
        seed: of the random order.
    """

    seconds: float = 2.0
    min_rounds: int = 7
    max_rounds: int = 2000
    block: float = 1e-3
    prepare: Command | None = None
    timer: Callable[[Command, int], float] = wall_clock
    seed: int = 0


@dataclass
class Timings:
    """Seconds per call of each command, one sample a round.

    Example:
        >>> timings = Timings({"loop": [4.0, 6.0, 5.0], "ours": [1.0, 0.5, 1.0]})
        >>> timings.median("loop"), timings.ratio("loop", "ours"), timings.difference("loop", "ours")
        (5.0, 5.0, 4.0)
    """

    samples: dict[str, list[float]]
    rounds: int = field(init=False)

    def __post_init__(self) -> None:
        self.rounds = min((len(values) for values in self.samples.values()), default=0)

    def __contains__(self, name: str) -> bool:
        return name in self.samples

    def median(self, name: str) -> float:
        """Median seconds of one call."""
        return statistics.median(self.samples[name])

    def fastest(self, *names: str) -> float:
        """The smallest median among these commands (those that were measured)."""
        return min(self.median(name) for name in names if name in self.samples)

    def ratio(self, name: str, base: str) -> float:
        """How many times longer ``name`` takes than ``base``: a ratio of medians."""
        return self.median(name) / self.median(base)

    def difference(self, name: str, base: str) -> float:
        """Seconds that ``name`` takes more than ``base``: the median, over the rounds, of the difference in a round.

        What other work on the machine does to a whole round falls out; of a difference of medians it would be the most.
        """
        return statistics.median(a - b for a, b in zip(self.samples[name], self.samples[base], strict=True))

    def medians(self) -> dict[str, float]:
        return {name: self.median(name) for name in self.samples}


def interleave(commands: Mapping[str, Command], plan: Plan | None = None) -> Timings:
    """Time the commands against each other, round by round, each round in a new random order.

    Args:
        commands: name → what to call. All should walk the same memory, or the one with the least looks faster.
        plan: how long; default ``Plan()``.

    Returns:
        Seconds per call, one sample per command and round. Python's garbage collector rests meanwhile.

    Example:
        >>> timings = interleave({"a": lambda: None, "b": lambda: sum(range(1000))}, Plan(seconds=0.02))
        >>> timings.ratio("b", "a") > 1.0
        True
    """
    plan = plan or Plan()
    repeats = {name: _repeats(command, plan) for name, command in commands.items()}
    order, dice = list(commands), random.Random(plan.seed)
    samples: dict[str, list[float]] = {name: [] for name in commands}
    collecting = gc.isenabled()
    gc.disable()
    end = time.perf_counter() + plan.seconds
    try:
        for done in range(plan.max_rounds):
            if done >= plan.min_rounds and time.perf_counter() > end:
                break
            dice.shuffle(order)
            for name in order:
                samples[name].append(_turn(commands[name], repeats[name], plan))
    finally:
        if collecting:
            gc.enable()
    return Timings(samples)


def _turn(command: Command, repeats: int, plan: Plan) -> float:
    """Seconds per call of one turn."""
    if plan.prepare is not None:
        plan.prepare()
    return plan.timer(command, repeats)


def _repeats(command: Command, plan: Plan) -> int:
    """Calls that fill one turn; also warms the command up."""
    _turn(command, 1, plan)
    once = min(_turn(command, 1, plan) for _ in range(2))
    if plan.prepare is not None or plan.block <= 0.0:
        return 1
    return max(1, math.ceil(plan.block / max(once, 1e-7)))
