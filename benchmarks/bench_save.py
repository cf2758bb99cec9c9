"""Saving and loading against torch's own, and the check for NaN and Inf against reading the same memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import nanscan
from benchmarks.conftest import Figures
from benchmarks.replay import CLOCK, record
from nanscan.bench import Plan, Timings, interleave
from nanscan.bench.goals import Goal, cell
from nanscan.bench.table import print_table, show_bytes, show_time
from nanscan.checkpoint.finite import check_finite_state
from nanscan.checkpoint.tensors import tensors_in

State = dict[str, Any]
Command = Callable[[], object]
GOALS = {"save": Goal(at_most=1.25), "load": Goal(at_most=1.3), "finite": Goal(at_least=0.8)}
BASE = {"save": "torch + fsync", "load": "torch", "finite": "flat sum"}


def model_and_adam(blocks: int, width: int) -> State:
    """Weights of a stack of blocks and Adam's two moments of each."""
    torch.manual_seed(0)
    model = {f"blocks.{i}.{n}": torch.randn(width, width) for i in range(blocks) for n in ("attn.weight", "mlp.weight")}
    moments = {i: {n: t.clone() for n in ("exp_avg", "exp_avg_sq")} for i, t in enumerate(model.values())}
    return {"model": model, "optimizer": {"state": moments, "param_groups": []}, "step": 1}


STATES: dict[str, Callable[[], State]] = {
    "mlp 25 MB": lambda: model_and_adam(4, 512),
    "1,000 small": lambda: {f"layer{i}.weight": torch.randn(64, 64) for i in range(1000)},
    "model + Adam 400 MB": lambda: model_and_adam(16, 1024),
    "one tensor 400 MB": lambda: {"w": torch.randn(100 << 20)},
}


@dataclass(frozen=True)
class SaveRow:
    """One comparison: seconds of ours and of the base, their ratio and its goal."""

    what: str
    state: str
    nbytes: int
    base: float
    ours: float
    ratio: float

    def to_dict(self) -> dict[str, Any]:
        goal = GOALS[self.what]
        return asdict(self) | {"goal": str(goal), "verdict": goal.verdict(self.ratio)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("save")
    yield path
    for file in path.iterdir():
        file.unlink()


def commands(what: str, state: State, folder: Path) -> dict[str, Command]:
    theirs, ours = folder / "torch.pt", folder / "nanscan.pt"
    if what == "save":
        return {"torch + fsync": lambda: save_and_sync(state, theirs), "ours": lambda: nanscan.save(state, ours)}
    save_and_sync(state, theirs)
    nanscan.save(state, ours)
    return {"torch": lambda: torch.load(theirs), "ours": lambda: nanscan.load(ours)}


def save_and_sync(state: State, path: Path) -> None:
    torch.save(state, path)
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.close(fd)


@cache
def measured(what: str, state: str, folder: Path, plan: Plan) -> tuple[Timings, int]:
    made = STATES[state]()
    nbytes = sum(found.tensor.nbytes for found in tensors_in(made))
    return interleave(commands(what, made, folder), plan), nbytes


@pytest.mark.benchmark(timer=CLOCK.now)
@pytest.mark.parametrize("command", ["base", "ours"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("what", ["save", "load"])
def test_save_and_load(
    benchmark: Any, figures: Figures, plan: Plan, folder: Path, what: str, state: str, command: str
) -> None:
    timings, nbytes = measured(what, state, folder, plan)
    name = BASE[what] if command == "base" else command
    benchmark.group = f"{what} {state}"
    record(benchmark, timings.samples[name], row=state, what=what, command=name)
    if command == "ours":
        add(figures, what, state, nbytes, timings)


@pytest.mark.benchmark(timer=CLOCK.now)
def test_finite_check(benchmark: Any, figures: Figures, plan: Plan) -> None:
    """The check of a state of 1 GB, walk included, against a sum over one flat buffer of its bytes."""
    state = model_and_adam(42, 1024)
    nbytes = sum(found.tensor.nbytes for found in tensors_in(state))
    flat = torch.ones(nbytes // 4)
    check = {
        "flat sum": lambda: torch.sum(flat),
        "flat dot": lambda: torch.dot(flat, flat),
        "ours": lambda: check_finite_state(tensors_in(state), "", True),
    }
    timings = interleave(check, plan)
    benchmark.group = "finite check"
    record(benchmark, timings.samples["ours"], row="1 GB", what="finite", command="ours")
    add(figures, "finite", "model + Adam 1 GB", nbytes, timings)


def add(figures: Figures, what: str, state: str, nbytes: int, timings: Timings) -> None:
    ours = timings.median("ours")
    base = timings.fastest("flat sum", "flat dot") if what == "finite" else timings.median(BASE[what])
    ratio = base / ours if what == "finite" else ours / base
    figures.add("save", SaveRow(what, state, nbytes, base, ours, ratio), print_save)


def print_save(rows: Sequence[SaveRow]) -> None:
    columns = ("what", "state", "bytes", "base", "ours", "ratio")
    print_table(
        "Saving and loading checkpoints",
        columns,
        [_cells(row) for row in rows],
        "save: nanscan.save ÷ (torch.save + fsync); load: nanscan.load with verification ÷ torch.load, from the page "
        "cache; finite: the fastest flat read ÷ the check of all tensors of the state",
    )


def _cells(row: SaveRow) -> list[str]:
    times = [show_time(row.base), show_time(row.ours)]
    return [row.what, row.state, show_bytes(row.nbytes), *times, cell(row.ratio, GOALS[row.what])]
