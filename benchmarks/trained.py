"""A training state of given shapes, to be copied and saved, and the figures of commands that were timed on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.goal_row import GoalRow
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
class StateRow(GoalRow):
    """Commands that were timed on one state."""

    tensors: int
    megabytes: float

    @classmethod
    def of(cls, row: str, live: Sequence[Tensor], timings: Timings, ratio: float, goal: Goal) -> StateRow:
        """From what was timed on the tensors `live`."""
        megabytes = sum(t.nbytes for t in live) / 1e6
        return cls(row, timings.rounds, timings.medians(), ratio, goal, timings, len(live), megabytes)


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
