"""Recovery with checkpoints on disk: when they are saved, restored, and what a new process takes over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

import nanscan
from tests.guarded import NAN, bits
from tests.recovery_support import make_batch, make_model, spoil, train

pytestmark = pytest.mark.filterwarnings("ignore::nanscan.NonFiniteWarning")


def start(folder: Path, **options: Any) -> tuple[Any, Any, nanscan.CheckpointManager, nanscan.Recovery]:
    model = make_model()
    optimizer = nanscan.wrap(optim.Adam(model.parameters(), lr=0.1), model)
    rhythm = {name: options.pop(name) for name in ("every_steps",) if name in options}
    manager = nanscan.CheckpointManager(folder, background=False, on_sigterm=None, keep=9, **rhythm)
    return model, optimizer, manager, nanscan.Recovery(model, optimizer, manager=manager, **options)


def steps_on_disk(manager: nanscan.CheckpointManager) -> list[int]:
    return [int(path.stem.split("-")[1]) for path in manager.checkpoints()]


def test_saves_in_the_rhythm_of_the_manager_or_else_of_the_snapshots(tmp_path: Path) -> None:
    for name, options, expected in [("own", {"every_steps": 3}, [3, 6, 9]), ("none", {}, [4, 8])]:
        model, optimizer, manager, recovery = start(tmp_path / name, snapshot_every=4, **options)
        for step in range(10):
            train(model, optimizer, make_batch(step))
            recovery.step()
        assert steps_on_disk(manager) == expected


def test_a_state_that_is_not_finite_is_not_saved_but_left_behind(tmp_path: Path) -> None:
    model, optimizer, manager, recovery = start(tmp_path, every_steps=2, snapshot_every=100)
    train(model, optimizer, make_batch(0))
    recovery.step()
    train(model, optimizer, make_batch(1))
    spoil(model)
    assert recovery.step() is True
    assert steps_on_disk(manager) == [] and nanscan.scan(model).finite


def test_restores_from_disk_where_no_snapshot_in_memory_is_intact(tmp_path: Path) -> None:
    model, optimizer, manager, recovery = start(tmp_path, snapshot_every=2)
    for step in range(4):
        train(model, optimizer, make_batch(step))
        recovery.step(batch=f"b{step}")
    saved = bits(dict(model.state_dict())), torch.get_rng_state().tolist()
    train(model, optimizer, make_batch(5))
    for copy in (recovery._memory.newest, recovery._memory.older):
        copy.work.targets[0].fill_(NAN)
    assert recovery.step(loss=NAN)
    assert (bits(dict(model.state_dict())), torch.get_rng_state().tolist()) == saved
    (rollback,) = recovery.rollbacks
    assert (rollback.to_step, rollback.to_batch) == (4, "b3") and rollback.source.endswith("step-00000004.pt")
    assert f"back to step 4 (from {rollback.source})" in rollback.describe()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert recovery.step(loss=NAN) and recovery.rollbacks[-1].source == "memory"
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_a_new_process_takes_over_counters_and_learning_rate(tmp_path: Path) -> None:
    model, optimizer, manager, recovery = start(tmp_path, snapshot_every=2)
    recovery.step(loss=NAN, batch="bad")
    for step in range(2):
        train(model, optimizer, make_batch(step))
        recovery.step()
    manager.close()
    model, optimizer, manager, other = start(tmp_path)
    restored = manager.restore(model=model, optimizer=optimizer)
    other.load_state_dict(restored.extra["recovery"])
    assert (other.step_index, other.bad_batches, other.rollbacks) == (2, ("bad",), recovery.rollbacks)
    other.step(loss=NAN)
    assert optimizer.param_groups[0]["lr"] == 0.025 and other.rolled_back_to == 2


def test_a_mask_that_the_manager_refuses_is_no_divergence(tmp_path: Path) -> None:
    model = make_model()
    model.register_buffer("mask", torch.tensor([-float("inf")]))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    manager = nanscan.CheckpointManager(tmp_path, background=False, on_sigterm=None)
    recovery = nanscan.Recovery(model, optimizer, manager=manager, snapshot_every=1)
    with pytest.raises(nanscan.CheckpointError, match='check_finite="nan"'), recovery:
        recovery.step()
    assert recovery.rollbacks == []
