"""A training state of given shapes, to be copied and saved, and the figures of commands that were timed on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nanscan.bench import Timings
from nanscan.bench.goals import Goal
from nanscan.bench.table import print_table, show_time

__all__ = ["LARGE", "StateRow", "print_states", "tensors_of", "trained"]

LARGE: dict[str, list[tuple[int, ...]]] = {
    "24 layers of 1024": [(1024, 1024), (1024,)] * 24,
    "embedding 50k x 512": [(50_000, 512)],
}


def trained(shapes: Sequence[tuple[int, ...]]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of such parameters after one step of AdamW, whose state is twice the weights."""
    model = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model:
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The weights and the optimizer's state."""
    state = [t for entries in optimizer.state.values() for t in entries.values() if isinstance(t, Tensor)]
    return [t.detach() for t in (*model.parameters(), *state)]


@dataclass(frozen=True)
class StateRow:
    """Median seconds of each command on one state; `ratio` is what `goal` is about."""

    row: str
    tensors: int
    megabytes: float
    rounds: int
    medians: dict[str, float]
    ratio: float
    goal: Goal
    timings: Timings = field(repr=False, compare=False)

    @classmethod
    def of(cls, row: str, live: Sequence[Tensor], timings: Timings, ratio: float, goal: Goal) -> StateRow:
        """From what was timed on the tensors `live`."""
        medians = {name: timings.median(name) for name in timings.samples}
        return cls(row, len(live), sum(t.nbytes for t in live) / 1e6, timings.rounds, medians, ratio, goal, timings)

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in asdict(self).items() if name not in ("goal", "timings")}
        return plain | {"goal": str(self.goal), "verdict": self.goal.verdict(self.ratio)}


def print_states(title: str, rows: Sequence[StateRow]) -> None:
    """The table of a suite: a row for each state, a column for each command."""
    print_table(
        f"{title}, goal {rows[0].goal}",
        ["row", "tensors", "MB", *rows[0].medians, "ratio", "goal"],
        [
            [r.row, str(r.tensors), f"{r.megabytes:.0f}", *map(show_time, r.medians.values()), f"{r.ratio:.3f}",
             r.goal.verdict(r.ratio)]
            for r in rows
        ],
    )  # fmt: skip
