"""What each rank does in the tests of sharded checkpoints; every function gets the rank and returns plain data."""

from __future__ import annotations

import warnings
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
        self.optimizer = nanscan.wrap(self.layout.inner, self.layout.model, clip_norm=0.5, **self.layout.options)
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
        inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        found = {name: whole(value) for name, value in inner.state_dict().items()}
        names = {id(p): name for name, p in inner.named_parameters()}
        for param, state in self.layout.inner.state.items():
            found.update({f"{names[id(param)]}/{key}": whole(value) for key, value in state.items()})
        found["lr"] = self.scheduler.get_last_lr()
        found["steps"] = self.optimizer._steps
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
