"""However a process is killed inside a save, the newest checkpoint is complete and at most one interval old."""

from __future__ import annotations

import random
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from nanscan import CheckpointManager, CheckpointWarning
from tests.manager_runs import leftovers
from tests.resume.forks import Child, Warm

KILLS = 100  # in the foreground, and as many in the background
SETUP = """
import os, sys, threading
import torch
from torch import nn
from nanscan import CheckpointManager
from tests.resume.test_killed_saves import SavedRun


SavedRun()  # what torch imports at the first optimizer is imported now


def train(folder, background):
    run = SavedRun()
    with CheckpointManager(folder, keep=2, background=background) as manager:
        restored = manager.restore(model=run.model, optimizer=run.optimizer)
        step = restored.step if restored else 0
        while True:
            step += 1
            run.fill(step)
            os.write(1, b"save %d\\n" % step)
            manager.save(step, model=run.model, optimizer=run.optimizer, extra={"value": step})
            if background:
                run.fill(-1)  # training goes on: none of this may be in the file
                manager.flush()
            os.write(1, b"done %d\\n" % step)
"""


class SavedRun:
    """A model and an optimizer of which every element says which step it is of."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(120, 120), nn.BatchNorm1d(120), nn.Linear(120, 120))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    @torch.no_grad()
    def fill(self, value: float) -> None:
        for parameter in self.model.parameters():
            parameter.fill_(value)
            self.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)

    def values(self) -> set[float]:
        """All values that occur."""
        found = [parameter for parameter in self.model.parameters()]
        found += [entry["momentum_buffer"] for entry in self.optimizer.state.values()]
        return {value for tensor in found for value in tensor.unique().tolist()}


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm(SETUP) as server:
        yield server


def last(child: Child, word: str) -> int:
    """The step of the last complete line that begins with `word`, 0 if there is none."""
    lines = [line.split() for line in child.output().split("\n")[:-1]]
    return max((int(step) for kind, step in lines if kind == word), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_newest_checkpoint_after_a_kill_inside_a_save_is_complete_and_at_most_one_interval_old(
    warm: Warm, tmp_path: Path, background: bool
) -> None:
    moments = random.Random(7)
    newest = unfinished = 0
    for _ in range(KILLS):
        child = warm.fork(f"train({str(tmp_path)!r}, {background})")
        child.expect(f"save {newest + moments.randint(1, 3)}\n")
        time.sleep(moments.uniform(0, 0.015))  # a save takes about as long
        child.kill(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, child.errors()
        begun, done = last(child, "save"), last(child, "done")
        unfinished += begun > done
        assert len(leftovers(tmp_path)) <= 1, "temporary files pile up"
        newest = check_newest(tmp_path, begun, done)
    assert unfinished > KILLS / 4, "too few kills hit a save"
    CheckpointManager(tmp_path, keep=2, background=False).save(newest + 1)
    assert leftovers(tmp_path) == []


def check_newest(folder: Path, begun: int, done: int) -> int:
    """The step of the newest checkpoint, after looking at every element of it."""
    run = SavedRun()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)  # nothing is passed over: no file is ever torn
        restored = CheckpointManager(folder).restore(model=run.model, optimizer=run.optimizer)
    if restored is None:
        assert done == 0 and begun <= 1
        return 0
    assert restored.step >= max(done, begun - 1)
    assert run.values() == {float(restored.step)} and restored.extra == {"value": restored.step}
    return restored.step
