"""`CheckpointManager.save` where several ranks save together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nanscan.manager import exits
from nanscan.manager.sharded.together import Job
from nanscan.state_copy import StateCopy

if TYPE_CHECKING:
    from nanscan.manager.manager import CheckpointManager

__all__ = ["copied", "save_together"]


def save_together(
    manager: CheckpointManager, step: int, model: nn.Module | None, build: Callable[[], dict[str, Any]], force: bool
) -> Path | None:
    """Save on all ranks if a save is due, as `CheckpointManager.save` does in one process.

    A call that is not due needs no word from the others, unless a clock or a signal may make it due: then the first
    rank's clock decides, and a signal that any rank got.

    Args:
        manager: of this rank.
        step: the same on all.
        model: of the run.
        build: makes this rank's state.
        force: the same on all.
    """
    together, due = manager._together, manager._schedule.due(step)
    if not (force or due or manager._schedule.every_seconds is not None or manager._on_sigterm == "stop"):
        return None
    word = together.word(step, due, manager._signalled)
    due = word.due or (word.stop and not manager.stop_requested)
    manager.stop_requested = manager.stop_requested or word.stop
    failed = together.next_error(word.done)
    assert together.mode is not None
    path = manager._folder.file(step) if together.mode.replicated else manager._folder.directory(step)
    done = force or due
    if done:
        try:
            with exits.deferred():
                _take(manager, step, model, build)
        except Exception as error:
            manager._failures.tell(error)
            done = False
        manager._schedule.saved()
    manager._failures.tell(failed)
    return path if done else None


def _take(manager: CheckpointManager, step: int, model: nn.Module | None, build: Callable[[], dict[str, Any]]) -> None:
    """Write it, or have it written; what one rank can't do is raised on all."""
    together, front = manager._together, manager._together.front
    built: list[dict[str, Any]] = []
    front.together(lambda: built.append(build()), "the states of the parts")
    state = built[0]
    metric = manager._metric_of(state)
    assert together.mode is not None
    if together.mode.replicated:
        state = together.with_ranks(state)
    job = together.job(state, model, metric)
    if not manager._background:
        together.write(manager, step, job)
        return
    buffer = manager._writer.take_buffer()
    copies: list[StateCopy] = []
    try:
        front.together(lambda: copies.append(copied(state, buffer)), "the copies of the states")
    except BaseException:
        manager._writer.give_back(None)
        raise
    _submit(manager, step, job, copies[0])


def _submit(manager: CheckpointManager, step: int, job: Job, copy: StateCopy) -> None:
    together = manager._together

    def write(step: int, copy: StateCopy) -> None:
        run = together.submitted(lambda: together.write(manager, step, job._replace(state=copy.result)))
        run()

    manager._writer.submit(step, copy, write)


def copied(state: dict[str, Any], former: StateCopy | None) -> StateCopy:
    """A copy in host memory, in that of a former one as far as it fits."""
    snapshot = StateCopy(state, former, torch.device("cpu"))
    snapshot.run()
    return snapshot
