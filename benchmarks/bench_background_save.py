"""How long a background save holds the training thread, against a save that returns when the file is on the disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import nanscan
from benchmarks.conftest import OUTPUT, Figures
from benchmarks.replay import CLOCK, record
from benchmarks.trained import LARGE, trained
from nanscan.bench import Plan, Timings, interleave
from nanscan.bench.goals import Goal
from nanscan.bench.table import print_table, show_time

GOAL = Goal(at_most=0.10)
SHAPES = {
    "4 layers of 1024": [(1024, 1024), (1024,)] * 4,
    **LARGE,
    "1,000 small": [(64,), (32, 32)] * 500,
}


@dataclass(frozen=True)
class BackgroundSaveRow:
    """Seconds until `save` returns, in the foreground and in the background; `ratio` is background / foreground."""

    row: str
    megabytes: float
    rounds: int
    medians: dict[str, float]
    ratio: float
    timings: Timings = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in asdict(self).items() if name != "timings"}
        return plain | {"goal": str(GOAL), "verdict": GOAL.verdict(self.ratio)}


@cache
def measured(row: str, plan: Plan) -> BackgroundSaveRow:
    """Both kinds of save in turn, on the file system of this folder; before each turn nothing is being written."""
    model, optimizer = trained(SHAPES[row])
    OUTPUT.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=OUTPUT))
    run = {"model": model, "optimizer": optimizer}
    try:
        with (
            nanscan.CheckpointManager(folder / "a", keep=1, background=False) as foreground,
            nanscan.CheckpointManager(folder / "b", keep=1) as background,
        ):
            background.save(0, **run)  # the host memory of the snapshot is there from then on
            commands = {
                "foreground": lambda: foreground.save(1, **run),
                "background": lambda: background.save(1, **run),
            }
            timings = interleave(commands, replace(plan, prepare=background.flush, min_rounds=5))
    finally:
        shutil.rmtree(folder)
    medians = {name: timings.median(name) for name in commands}
    size = 3 * sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
    return BackgroundSaveRow(row, size, timings.rounds, medians, timings.ratio("background", "foreground"), timings)


def print_rows(rows: Sequence[BackgroundSaveRow]) -> None:
    """The table of this suite."""
    print_table(
        f"time until save() returns: weights and AdamW's state, fsync'ed; ratio = background / foreground, goal {GOAL}",
        ["row", "MB", "foreground", "background", "ratio", "goal"],
        [
            [
                r.row,
                f"{r.megabytes:.0f}",
                *(show_time(r.medians[name]) for name in ("foreground", "background")),
                f"{r.ratio:.3f}",
                GOAL.verdict(r.ratio),
            ]
            for r in rows
        ],
    )


@pytest.mark.benchmark(timer=CLOCK.now)
@pytest.mark.parametrize("command", ["foreground", "background"])
@pytest.mark.parametrize("row", SHAPES)
def test_background_save(benchmark, figures: Figures, plan: Plan, row: str, command: str) -> None:
    result = measured(row, plan)
    benchmark.group = f"background save {row}"
    record(benchmark, result.timings.samples[command], row=row, command=command)
    if command == "background":
        figures.add("background_save", result, print_rows)
