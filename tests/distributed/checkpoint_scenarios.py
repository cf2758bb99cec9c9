"""What each rank does in the tests of sharded checkpoints; every function gets the rank and returns plain data."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import nanscan
from tests.distributed.layouts import LAYOUTS, Layout, batch


class Run:
    """A guarded training run in a layout, with all that a checkpoint holds."""

    def __init__(self, rank: int, name: str, scale: float = 1.0) -> None:
        self.layout: Layout = LAYOUTS[name](rank, dist.get_world_size())
        self.is_ddp = isinstance(self.layout.model, torch.nn.parallel.DistributedDataParallel)
        self.optimizer: Any = nanscan.wrap(self.layout.inner, self.layout.model, clip_norm=0.5, **self.layout.options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.parts: dict[str, Any] = {
            "model": self.layout.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }
        self.scale = scale

    def train(self, first: int, last: int) -> None:
        """Steps that also draw random numbers, other ones on each rank."""
        for step in range(first, last):
            self.optimizer.zero_grad()
            index, shares = self.layout.share
            x = batch(step).chunk(shares)[index] * self.scale
            if shares > 1:
                x = x + 0.01 * torch.rand(())
            out = self.layout.model(x)
            out = out.full_tensor() if isinstance(out, DTensor) else out
            (out.square().mean() * 20.0).backward()
            self.layout.reduce()
            self.optimizer.step()
            self.layout.after()
            self.scheduler.step()

    def values(self) -> dict[str, Any]:
        """All weights and optimizer state as whole tensors, and what else is restored."""
        model = self.layout.model
        inner: Any = model.module if self.is_ddp else model
        found = {name: whole(value) for name, value in inner.state_dict().items()}
        names = {id(p): name for name, p in inner.named_parameters()}
        for param, state in self.layout.inner.state.items():
            found.update({f"{names[id(param)]}/{key}": whole(value) for key, value in state.items()})
        found["lr"] = self.scheduler.get_last_lr()
        found["steps"] = getattr(self.optimizer, "_steps", None)
        return found


def whole(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().double().tolist() if isinstance(value, Tensor) else value


def seeded(rank: int) -> None:
    torch.manual_seed(50 + rank)


def outcome(action: Any) -> str:
    """The error of what is tried, "" if there is none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_and_go_on(rank: int, name: str, folder: str, background: bool) -> Any:
    """(values at the checkpoint, values three steps later)."""
    seeded(rank)
    run = Run(rank, name)
    run.train(0, 3)
    with nanscan.CheckpointManager(folder, background=background, **run.layout.options) as manager:
        path = manager.save(3, **run.parts, extra={"loss": 0.5}, epoch=1)
        at_save = run.values()
        run.train(3, 6)
    return str(path), at_save, run.values()


def restore_and_go_on(rank: int, name: str, folder: str) -> Any:
    """The same from a restored run that had gone elsewhere: (values, values three steps later, facts)."""
    torch.manual_seed(900 + rank)
    run = Run(rank, name, scale=0.1)
    run.train(0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with nanscan.CheckpointManager(folder, **run.layout.options) as manager:
            restored = manager.restore(**run.parts)
    run.scale = 1.0
    at_restore = run.values()
    run.train(3, 6)
    facts = (restored.step, restored.epoch, restored.extra, restored.missing, len(restored.passed_over))
    return at_restore, run.values(), facts


def values_after_restore(rank: int, name: str, folder: str) -> Any:
    """(values, step, parts that were not restored) of a fresh run, on whatever number of ranks."""
    torch.manual_seed(900 + rank)
    run = Run(rank, name)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with nanscan.CheckpointManager(folder) as manager:
            restored = manager.restore(**run.parts)
    passed = [(item.path.name, item.reason) for item in restored.passed_over]
    return run.values(), restored.step, passed, [str(item.message) for item in said]


def a_nan_on_one_rank(rank: int, folder: str, background: bool) -> Any:
    """What saving says when the last row of a weight, which the last rank holds, is NaN."""
    run = Run(rank, "fsdp")
    run.train(0, 1)
    with nanscan.CheckpointManager(folder, background=background) as manager:
        manager.save(1, **run.parts)
        manager.flush()
        weight: Any = run.layout.model.down.weight
        if rank == dist.get_world_size() - 1:
            weight._local_tensor.detach()[-1, 3] = float("nan")

        def save() -> None:
            manager.save(2, **run.parts)
            manager.flush()

        said = outcome(save)
        return said, [path.name for path in manager.checkpoints()], sorted(item.name for item in Path(folder).iterdir())


def rhythm(rank: int, folder: str) -> Any:
    """Which checkpoints stay, and which calls said that they save; the clocks of the ranks disagree."""
    run = Run(rank, "fsdp")
    scores = [0.1, 0.9, 0.3, 0.2, 0.4, 0.6]
    saved = []
    with nanscan.CheckpointManager(folder, keep=2, every_steps=2, best=("score", "max"), best_keep=1) as manager:
        for step in range(1, 13):
            path = manager.save(step, **run.parts, extra={"score": scores[(step - 1) // 2]})
            saved.append(None if path is None else path.name)
        manager.flush()
        dist.barrier()
        kept, best = [path.name for path in manager.checkpoints()], manager.best_checkpoint()
        assert best is not None
        restored = manager.restore(**run.parts, path=best)
    with nanscan.CheckpointManager(folder, every_seconds=3600) as manager:
        manager._schedule._last -= 7200 * (rank == 1)
        not_due = manager.save(20, **run.parts)
        manager._schedule._last -= 7200 * (rank == 0)
        due = manager.save(21, **run.parts)
    return [name for name in saved if name], kept, best.name, restored.step, not_due, due and due.name


def stop_on_one_rank(rank: int, folder: str) -> Any:
    """One rank gets a SIGTERM; all of them save and end at the same step."""
    run = Run(rank, "fsdp")
    with nanscan.CheckpointManager(folder, every_steps=100, on_sigterm="stop") as manager:
        for step in range(1, 6):
            if step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            manager.save(step, force=manager.stop_requested, **run.parts)
            if manager.stop_requested:
                break
        manager.flush()
        return step, [path.name for path in manager.checkpoints()]


def one_rank_can_not(rank: int, folder: str) -> Any:
    """An argument that is wrong on one rank only, in three ways; nobody waits for it, and the next save works."""
    run = Run(rank, "fsdp")
    said = []
    with nanscan.CheckpointManager(folder, background=False) as manager:
        bad: dict[str, Any] = {"x": lambda: 1} if rank == 1 else {}
        said.append(outcome(lambda: manager.save(1, **run.parts, extra=bad)))
        said.append(outcome(lambda: manager.save(1, **run.parts, extra=3 if rank == 1 else None)))
        said.append(outcome(lambda: manager.save(1 + rank, **run.parts)))
        manager.save(4, **run.parts)
        return said, sorted(item.name for item in Path(folder).iterdir())


def buffers_and_weights_apart(rank: int, folder: str) -> Any:
    """A buffer that each rank has for itself is restored on each; a plain weight that differs is refused."""
    run = Run(rank, "mixed")
    run.layout.model.register_buffer("seen", torch.full((3,), float(rank)))
    with nanscan.CheckpointManager(folder, background=False) as manager:
        manager.save(1, **run.parts)
        with torch.no_grad():
            run.layout.model.seen.zero_()
        manager.restore(**run.parts)
        seen = run.layout.model.seen.tolist()
        with torch.no_grad():
            run.layout.model.down.bias.add_(rank)
        said = outcome(lambda: manager.save(2, **run.parts))
        return seen, said, [path.name for path in manager.checkpoints()]


def a_part_that_does_not_fit(rank: int, folder: str) -> Any:
    """Another model's checkpoint: every rank keeps what it has, also where only one rank can't load."""
    run = Run(rank, "fsdp")
    other = Run(rank, "fsdp")
    with nanscan.CheckpointManager(folder, background=False) as manager:
        manager.save(1, **run.parts)
        other.layout.model.register_parameter("new", torch.nn.Parameter(torch.ones(2)))
        other.train(0, 1)
        before = other.values()
        strict = outcome(lambda: manager.restore(**other.parts))
        same = before == other.values()
        run.train(0, 1)
        manager.save(2, **run.parts, loader=Loader(rank, 1))
        run.train(1, 2)
        before = run.values()
        alone = outcome(lambda: manager.restore(**run.parts, loader=Loader(rank, 2)))
        return strict, same, alone, before == run.values()


class Loader:
    """Can go to another place on the first rank only."""

    def __init__(self, rank: int, at: int) -> None:
        self.rank, self.at = rank, at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        if self.rank and state["at"] != self.at:
            raise ValueError("not on this rank")


def not_there_yet(rank: int, folder: str) -> Any:
    zero = Run(rank, "zero1")
    run = Run(rank, "fsdp")
    average = {"weight": run.layout.model.up.weight}
    with nanscan.CheckpointManager(folder, background=False, process_group=True) as manager:
        first = outcome(lambda: manager.save(1, **zero.parts))
        return first, outcome(lambda: manager.save(1, **run.parts, extra={"average": average}))


def save_later(rank: int, folder: str, step: int) -> None:
    """One more checkpoint, of other values."""
    run = Run(rank, "fsdp")
    run.train(0, 1)
    with nanscan.CheckpointManager(folder, background=False) as manager:
        manager.save(step, **run.parts)


def by_torch_alone(rank: int, folder: str) -> bool:
    """A folder of the manager's, loaded by torch's own functions."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    run, other = Run(rank, "fsdp"), Run(rank, "fsdp")
    run.train(0, 2)
    with nanscan.CheckpointManager(folder, background=False) as manager:
        path = manager.save(2, **run.parts)
    dcp.load({"model": get_model_state_dict(other.layout.model)}, checkpoint_id=path)
    return all(
        torch.equal(whole_of(a), whole_of(b))
        for a, b in zip(run.layout.model.parameters(), other.layout.model.parameters(), strict=True)
    )


def whole_of(value: Any) -> Tensor:
    found: Tensor = value.full_tensor()
    return found


def by_pairs(rank: int, folder: str) -> Any:
    """Two managers of two ranks each, over the groups of a mesh: (what was saved, what was restored)."""
    run = Run(rank, "part_mesh")
    weight: Any = run.layout.model.up.weight
    pair = weight.device_mesh.get_group()
    place = f"{folder}/{min(dist.get_process_group_ranks(pair))}"
    run.train(0, 1)
    with nanscan.CheckpointManager(place, process_group=pair) as manager:
        manager.save(1, **run.parts)
        before = [shard.tolist() for shard in map(local, run.layout.model.parameters())]
        run.train(1, 2)
        restored = manager.restore(**run.parts)
        after = [shard.tolist() for shard in map(local, run.layout.model.parameters())]
        assert restored is not None
        return before == after, restored.path.parent.name


def local(value: Any) -> Tensor:
    found: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return found


def told_at_the_same_call(rank: int, folder: str) -> list[str]:
    """A background save fails on all; one rank's thread is late to hear: what each of the next saves says."""
    run = Run(rank, "fsdp")
    said = []
    with nanscan.CheckpointManager(folder) as manager:
        shard = local(run.layout.model.down.weight.detach())
        kept = shard.clone()
        shard[:] = float("nan")
        manager.save(1, **run.parts)
        shard.copy_(kept)
        if rank == 0:
            manager._writer.wait()  # the others may not know yet
        for step in (2, 3, 4):
            said.append(outcome(lambda step=step: manager.save(step, **run.parts)).partition(":")[0])
            if step == 3:
                manager._writer.wait()
    return said
