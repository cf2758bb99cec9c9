"""The step suite: what a guarded step adds to a bare one, unclipped and clipped.

All optimizers of a row share the parameters, the gradients and the optimizer state, so that each step walks the very
same memory. Where clipping is active, the gradients are restored before every turn, untimed, for every command alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import nanscan
from nanscan.bench.goals import CLIP_ADVANTAGE, STEP_OVERHEAD, cell, step_bound
from nanscan.bench.gradients import Gradients, make_gradients
from nanscan.bench.peers import FLAT_READS, flat_reads, loop_check, loop_clip
from nanscan.bench.shapes import Workload, workload
from nanscan.bench.table import print_table, show_time
from nanscan.bench.timing import Command, Plan, Timings, interleave

__all__ = ["ClippedRow", "StepRow", "Twins", "measure_clipped", "measure_step", "print_clipped_rows", "print_step_rows"]

Peer = Callable[["Twins"], Command]


class Twins:
    """Optimizers that share parameters, gradients and state.

    Args:
        made: parameters with gradients.
        fused: fused AdamW, else foreach AdamW.

    Example:
        >>> twins = Twins(make_gradients([(3,)]), fused=True)
        >>> twins.optimizer().state is twins.optimizer().state
        True
    """

    def __init__(self, made: Gradients, fused: bool) -> None:
        self.made, self.fused = made, fused
        self._first = self._new()
        self._first.step()  # fills the state that all share

    def optimizer(self) -> torch.optim.AdamW:
        """One more optimizer over the same parameters and state."""
        twin = self._new()
        twin.state = self._first.state
        return twin

    def _new(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.made.parameters, lr=1e-6, fused=self.fused or None, foreach=not self.fused)


@dataclass(frozen=True)
class StepRow:
    """An unclipped step, in seconds; ``used`` is the share of the allowed overhead that the guard takes."""

    row: str
    optimizer: str
    tensors: int
    rounds: int
    medians: dict[str, float]
    flat_read: float
    added: float  # guarded − bare
    allowed: float
    used: float
    timings: Timings = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        names = ("row", "optimizer", "tensors", "rounds", "medians", "flat_read", "added", "allowed", "used")
        verdict = STEP_OVERHEAD.verdict(self.used)
        return {name: getattr(self, name) for name in names} | {"goal": str(STEP_OVERHEAD), "verdict": verdict}


@dataclass(frozen=True)
class ClippedRow:
    """A clipped step, in seconds; ``advantage`` is (loop − bare) ÷ (guarded − bare), likewise for torch's clipping."""

    row: str
    optimizer: str
    tensors: int
    rounds: int
    medians: dict[str, float]
    added: float
    loop_added: float
    torch_added: float
    advantage: float
    torch_advantage: float
    timings: Timings = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        names = ("row", "optimizer", "tensors", "rounds", "medians", "added", "loop_added", "torch_added")
        figures = {name: getattr(self, name) for name in (*names, "advantage", "torch_advantage")}
        return figures | {"goal": str(CLIP_ADVANTAGE), "verdict": CLIP_ADVANTAGE.verdict(self.advantage)}


def measure_step(
    row: Workload, plan: Plan | None = None, peers: dict[str, Peer] | None = None, fused: bool = True
) -> StepRow:
    """Time a bare and a guarded AdamW step without clipping.

    Args:
        row: the shapes (float32).
        plan: how long to measure.
        peers: further commands, each made from the row's ``Twins``.
        fused: fused AdamW, else foreach AdamW.
    """
    twins = Twins(make_gradients(row.shapes), fused)
    timings = interleave(_step_commands(twins, peers or {}), plan)
    flat_read = timings.fastest(*FLAT_READS)
    added, allowed = timings.difference("guarded", "bare"), step_bound(flat_read, row.tensors)
    return StepRow(
        row=row.name,
        optimizer=_name(fused),
        tensors=row.tensors,
        rounds=timings.rounds,
        medians=timings.medians(),
        flat_read=flat_read,
        added=added,
        allowed=allowed,
        used=added / allowed,
        timings=timings,
    )


def measure_clipped(
    row: Workload, fused: bool, plan: Plan | None = None, peers: dict[str, Peer] | None = None
) -> ClippedRow:
    """Time AdamW steps whose gradients have twice the norm allowed, so that every step clips.

    Args:
        row: the shapes (float32).
        fused: fused AdamW, else foreach AdamW.
        plan: how long to measure.
        peers: further commands, each made from the row's ``Twins``.
    """
    made = make_gradients(row.shapes)
    original = made.flat.clone()
    commands = _clipped_commands(Twins(made, fused), half_norm(made), peers or {})
    plan = replace(plan or Plan(), prepare=lambda: made.flat.copy_(original))
    timings = interleave(commands, plan)
    added, loop_added = timings.difference("guarded", "bare"), timings.difference("loop", "bare")
    torch_added = timings.difference("torch clip", "bare")
    return ClippedRow(
        row=row.name,
        optimizer=_name(fused),
        tensors=row.tensors,
        rounds=timings.rounds,
        medians=timings.medians(),
        added=added,
        loop_added=loop_added,
        torch_added=torch_added,
        advantage=_times(loop_added, added),
        torch_advantage=_times(torch_added, added),
        timings=timings,
    )


def half_norm(made: Gradients) -> float:
    """Half of the gradients' total norm."""
    return 0.5 * float(torch.linalg.vector_norm(made.flat.double()))


def _step_commands(twins: Twins, peers: dict[str, Peer]) -> dict[str, Command]:
    bare, checked = twins.optimizer(), twins.optimizer()
    guarded = nanscan.wrap(twins.optimizer())
    parameters = twins.made.parameters

    def loop() -> None:
        if not loop_check(parameters)[0]:
            checked.step()

    own: dict[str, Command] = {"bare": bare.step, "guarded": guarded.step, "loop": loop, **flat_reads(twins.made.flat)}
    return own | {name: make(twins) for name, make in peers.items()}


def _clipped_commands(twins: Twins, max_norm: float, peers: dict[str, Peer]) -> dict[str, Command]:
    bare, looped, clipped = twins.optimizer(), twins.optimizer(), twins.optimizer()
    guarded = nanscan.wrap(twins.optimizer(), clip_norm=max_norm)
    parameters = twins.made.parameters

    def loop() -> None:
        if loop_clip(parameters, max_norm):
            looped.step()

    def torch_clip() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
        clipped.step()

    own: dict[str, Command] = {"bare": bare.step, "guarded": guarded.step, "loop": loop, "torch clip": torch_clip}
    return own | {name: make(twins) for name, make in peers.items()}


def _name(fused: bool) -> str:
    return "AdamW fused" if fused else "AdamW foreach"


def _times(theirs: float, ours: float) -> float:
    """How many times ours goes into theirs; infinite where ours can't be told from nothing."""
    return theirs / ours if ours > 0.0 else float("inf")


def print_step_rows(rows: Sequence[StepRow]) -> None:
    """Print the unclipped steps."""
    names = sorted({name for row in rows for name in row.medians} - {"bare", "guarded", *FLAT_READS})
    columns = ("row", "optimizer", "bare", "guarded", "guard adds", "allowed", "used", *(f"{n} adds" for n in names))
    print_table(
        "A guarded step, not clipped",
        columns,
        [_step_cells(row, names) for row in rows],
        "allowed: 1.15 × one flat read of the gradients + 100 ns per tensor + 10 µs",
    )


def _step_cells(row: StepRow, names: Sequence[str]) -> list[str]:
    bare = row.medians["bare"]
    times = (bare, row.medians["guarded"], row.added, row.allowed)
    others = [show_time(row.medians[name] - bare) if name in row.medians else "–" for name in names]
    used = cell(row.used, STEP_OVERHEAD)
    return [workload(row.row).title, row.optimizer, *map(show_time, times), used, *others]


def print_clipped_rows(rows: Sequence[ClippedRow]) -> None:
    """Print the clipped steps."""
    names = sorted({name for row in rows for name in row.medians} - {"bare", "guarded", "loop", "torch clip"})
    columns = (
        "row",
        "optimizer",
        "bare",
        "guard adds",
        "loop adds",
        "torch clip adds",
        "loop ÷ guard",
        "torch ÷ guard",
    )
    print_table(
        "A guarded step, clipped",
        (*columns, *(f"{name} adds" for name in names)),
        [_clipped_cells(row, names) for row in rows],
        "adds: the median, over the rounds, of the difference to the bare step of the same round",
    )


def _clipped_cells(row: ClippedRow, names: Sequence[str]) -> list[str]:
    bare = row.medians["bare"]
    times = (bare, row.added, row.loop_added, row.torch_added)
    others = [show_time(row.medians[name] - bare) if name in row.medians else "–" for name in names]
    ratios = [cell(row.advantage, CLIP_ADVANTAGE, 1), cell(row.torch_advantage, None)]
    return [workload(row.row).title, row.optimizer, *map(show_time, times), *ratios, *others]
