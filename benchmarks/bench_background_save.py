"""How long a background save holds the training thread, against a save that returns when the file is on the disk."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

import nanscan
from benchmarks.conftest import OUTPUT, Figures
from benchmarks.replay import CLOCK, record
from benchmarks.trained import LARGE, StateRow, print_states, tensors_of, trained
from nanscan.bench import Plan, interleave
from nanscan.bench.goals import Goal

GOAL = Goal(at_most=0.10)
TITLE = "time until save() returns: weights and AdamW's state, fsync'ed; ratio = background / foreground"
SHAPES = {
    "4 layers of 1024": [(1024, 1024), (1024,)] * 4,
    **LARGE,
    "1,000 small": [(64,), (32, 32)] * 500,
}


@cache
def measured(row: str, plan: Plan) -> StateRow:
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
    ratio = timings.ratio("background", "foreground")
    return StateRow.of(row, tensors_of(model, optimizer), timings, ratio, GOAL)


@pytest.mark.benchmark(timer=CLOCK.now)
@pytest.mark.parametrize("command", ["foreground", "background"])
@pytest.mark.parametrize("row", SHAPES)
def test_background_save(benchmark, figures: Figures, plan: Plan, row: str, command: str) -> None:
    result = measured(row, plan)
    benchmark.group = f"background save {row}"
    record(benchmark, result.timings.samples[command], row=row, command=command)
    if command == "background":
        figures.add("background_save", result, partial(print_states, TITLE))
