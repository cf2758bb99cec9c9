"""What checking each batch costs: in an epoch of the demo, and per byte of large batches against a flat read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import nanscan
from benchmarks.conftest import Figures
from benchmarks.goal_row import GoalRow
from benchmarks.replay import CLOCK, record
from nanscan.bench import Plan, interleave
from nanscan.bench.goals import Goal
from nanscan.bench.peers import flat_reads
from nanscan.bench.table import print_table, show_time
from nanscan.demo.data import batches, load_digits
from nanscan.demo.model import DigitNet

EPOCH = Goal(at_most=1.02)  # an epoch with CheckedLoader / one without
READ = Goal(at_least=0.8)  # the fastest flat read / check_batch
BATCH_SIZE = 64
FLOATS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "64 images 3x224x224": lambda: {"image": torch.randn(64, 3, 224, 224), "labels": torch.randint(0, 1000, (64,))},
    "512 rows of 16,384": lambda: {"x": torch.randn(512, 16_384), "y": torch.randint(0, 10, (512,))},
    "40 fields of 1 MB": lambda: {f"feature{i}": torch.randn(256, 1024) for i in range(40)},
    "bf16 images": lambda: {"image": torch.randn(128, 3, 224, 224).bfloat16()},
}


def epoch_of(loader: Any, on_guard: bool) -> Callable[[], None]:
    """One epoch of the demo's network over the loader; each run goes on with the same weights."""
    torch.manual_seed(0)
    model = DigitNet()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = nanscan.wrap(plain, model, clip_norm=1.0) if on_guard else plain

    def run() -> None:
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

    return run


@cache
def epoch_row(row: str, plan: Plan) -> GoalRow:
    data = list(batches(load_digits(), 1, BATCH_SIZE, seed=0))
    spec = nanscan.BatchSpec.from_model(DigitNet()) if row == "epoch, spec of the model" else None
    guard = row == "epoch, guarded"
    commands = {
        "plain": epoch_of(data, guard),
        "checked": epoch_of(nanscan.CheckedLoader(data, spec), guard),
    }
    timings = interleave(commands, plan)
    medians = {name: timings.median(name) for name in commands}
    return GoalRow(row, timings.rounds, medians, timings.ratio("checked", "plain"), EPOCH, timings)


def in_one_buffer(batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The batch with its floats as views of one flat buffer, and that buffer.

    A copy of the floats would be another piece of memory, which two or three reads a round keep in the cache while the
    batch, looked at once, falls out of it.
    """
    floats = {name: value for name, value in batch.items() if value.is_floating_point()}
    flat = torch.cat([value.flatten() for value in floats.values()])
    parts = flat.split([value.numel() for value in floats.values()])
    views = {name: part.view(value.shape) for (name, value), part in zip(floats.items(), parts, strict=True)}
    return batch | views, flat


@cache
def read_row(row: str, plan: Plan) -> GoalRow:
    batch, flat = in_one_buffer(FLOATS[row]())
    assert nanscan.check_batch(batch) == []
    reads = flat_reads(flat)
    timings = interleave({**reads, "checked": lambda: nanscan.check_batch(batch)}, plan)
    limit = timings.fastest(*reads)
    medians = {"plain": limit, "checked": timings.median("checked")}
    return GoalRow(row, timings.rounds, medians, limit / medians["checked"], READ, timings)


def print_rows(rows: list[GoalRow]) -> None:
    """The table of this suite."""
    print_table(
        f"batches: an epoch of the demo, ratio = checked / plain, goal {EPOCH}; large batches, ratio = fastest flat "
        f"read / check_batch, goal {READ}",
        ["row", "plain", "checked", "ratio", "goal"],
        [
            [
                r.row,
                show_time(r.medians["plain"]),
                show_time(r.medians["checked"]),
                f"{r.ratio:.3f}",
                r.goal.verdict(r.ratio),
            ]
            for r in rows
        ],
    )


ROWS: dict[str, Callable[[str, Plan], GoalRow]] = {
    "epoch": epoch_row,
    "epoch, spec of the model": epoch_row,
    "epoch, guarded": epoch_row,
    **dict.fromkeys(FLOATS, read_row),
}


@pytest.mark.benchmark(timer=CLOCK.now)
@pytest.mark.parametrize("row", ROWS)
def test_batches(benchmark, figures: Figures, plan: Plan, row: str) -> None:
    result = ROWS[row](row, plan)
    benchmark.group = f"batches {row}"
    record(benchmark, result.timings.samples["checked"], row=row, command="checked")
    figures.add("batches", result, print_rows)
