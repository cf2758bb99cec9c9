"""What each rank does in the tests of recovery over several ranks; every function gets the rank."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist

import nanscan
from nanscan.engine.shards import is_dtensor, local_of
from tests.distributed.checkpoint_scenarios import Run, outcome, seeded

NAN = float("nan")


def shard_of(value: Any) -> torch.Tensor:
    return local_of(value.detach()) if is_dtensor(value) else value.detach()


def spoil(run: Run, what: str) -> Any:
    """Make what this rank holds bad; the loss to tell, if it is that."""
    if what == "weight":
        shard_of(run.layout.model.get_parameter("module.down.bias" if run.is_ddp else "down.bias"))[-1] = NAN
    if what == "state":
        for param, state in run.layout.inner.state.items():
            if shard_of(param).numel():
                shard_of(state["exp_avg"]).view(-1)[0] = NAN
                break
    return NAN if what == "loss" else None


def back_together(rank: int, name: str, what: str, guarded: bool) -> Any:
    """A run that is spoiled on rank 1 at step 5 after a snapshot at step 3; and what it was like at step 3."""
    seeded(rank)
    run = Run(rank, name)
    optimizer = run.optimizer if guarded else run.layout.inner
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run.optimizer, run.scheduler = optimizer, scheduler
    recovery = nanscan.Recovery(run.layout.model, optimizer, scheduler=scheduler, snapshot_every=3, lr_backoff=1.0)
    at_snapshot: Any = None
    returned = []
    for step in range(6):
        run.train(step, step + 1)
        loss = spoil(run, what) if step == 5 and rank == 1 else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            returned.append(recovery.step(loss=loss))
        if step == 2:
            at_snapshot = ({**run.values(), "steps": None}, torch.get_rng_state().tolist())
    at_return = ({**run.values(), "steps": None}, torch.get_rng_state().tolist())
    causes = [(one.cause, one.step, one.to_step) for one in recovery.rollbacks]
    reason = recovery.rollbacks[0].reason if recovery.rollbacks else ""
    return returned, at_snapshot[0] == at_return[0], at_snapshot[1] == at_return[1], causes, reason, recovery.step_index


def raises_on_one_rank(rank: int) -> Any:
    """An error of the guard on one rank only, inside the with block, while the other takes its step()."""
    run = Run(rank, "fsdp")
    recovery = nanscan.Recovery(run.layout.model, run.optimizer, snapshot_every=1)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            with recovery:
                run.train(step, step + 1)
                if step == 1 and rank == 1:
                    raise nanscan.NonFiniteError("a NaN that only this rank saw")
            seen.append(recovery.step())
    return seen, [one.to_step for one in recovery.rollbacks], recovery.step_index, run.values()


def from_disk(rank: int) -> Any:
    """One rank's snapshots are spoiled from outside: all ranks take the sharded checkpoint."""
    seeded(rank)
    run = Run(rank, "fsdp")
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    with nanscan.CheckpointManager(folder[0]) as manager:
        recovery = nanscan.Recovery(
            run.layout.model, run.optimizer, scheduler=run.scheduler, manager=manager, snapshot_every=2, lr_backoff=1.0
        )
        for step in range(2):
            run.train(step, step + 1)
            recovery.step()
        values = run.values()
        manager.flush()
        run.train(2, 3)
        if rank == 1:
            for saved in (recovery._memory.newest, recovery._memory.older):
                for target in saved.work.targets if saved is not None else ():
                    if target.is_floating_point():
                        target.fill_(NAN)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recovery.step(loss=NAN)
        restored = run.values()
        source = recovery.rollbacks[0].source.rpartition("/")[2]
        run.train(2, 3)
        return source, recovery.rollbacks[0].to_step, restored == values, outcome(recovery.step)


def bad_at_the_start(rank: int) -> str:
    run = Run(rank, "fsdp")
    if rank == 1:
        spoil(run, "weight")
    return outcome(lambda: nanscan.Recovery(run.layout.model, run.optimizer))
