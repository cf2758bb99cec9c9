"""What each rank does in the tests of `tests/distributed`; every function gets the rank and returns plain data."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import nanscan
from nanscan.engine.shards import box_of
from tests.distributed.layouts import LAYOUTS, Layout, batch, fresh, optimizer

STEPS = 5
NAN = float("nan")
Plant = tuple[str, tuple[int, ...], int | None]  # parameter, index, rank (None: all that hold it)


def train(rank: int, name: str, plant: Plant | None = None, micro: int = 1, **options: Any) -> dict[str, Any]:
    """A guarded run in a layout, with a NaN planted at step 2; micro-batches of one step are accumulated."""
    layout = LAYOUTS[name](rank, dist.get_world_size())
    return run(layout, rank, plant, micro, **options)


def run(layout: Layout, rank: int, plant: Plant | None, micro: int = 1, **options: Any) -> dict[str, Any]:
    model = layout.wrapped or layout.model
    guarded = nanscan.wrap(layout.inner, model, **{"clip_norm": 0.5, **layout.options, **options})
    seen: dict[str, list[Any]] = {"norm": [], "factor": [], "skipped": [], "calls": [], "report": []}
    for step in range(STEPS):
        guarded.zero_grad()
        for part in range(micro):
            with layout.no_sync() if part < micro - 1 else torch.enable_grad():
                poisoned = plant is not None and plant[0] == "loss" and (step, part, rank) == (2, *plant[1], plant[2])
                _loss(layout, step, part, micro, NAN if poisoned else 1.0).backward()
        layout.reduce()
        if plant is not None and step == 2:
            _plant(_named(model), plant, rank)
        with profile(activities=[ProfilerActivity.CPU]) as spent, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            guarded.step()
        layout.after()
        report = guarded.last_report
        seen["norm"].append(report.norm)
        seen["factor"].append(report.clip_factor)
        seen["skipped"].append(report.skipped)
        seen["calls"].append(collectives(spent))
        seen["report"].append(told(report))
    return {**seen, "weights": {n: _whole(p).tolist() for n, p in _named(model).items()}, "left": guarded.skipped_steps}


def alone(plant: Plant | None, frozen: bool = False, micro: int = 1, **options: Any) -> dict[str, Any]:
    """The same run in one process; also in the process of the tests."""
    model = fresh()
    model.up.requires_grad_(not frozen)
    layout = Layout(model, optimizer(model.parameters()), (0, 1))
    return run(layout, 0, plant, micro, process_group=False, **options)


def collectives(spent: Any) -> list[str]:
    """The collectives that the profiler saw, one for each call."""
    return [e.key[6:] for e in spent.key_averages() for _ in range(e.count) if e.key.startswith("c10d::")]


def told(report: nanscan.StepReport) -> dict[str, Any]:
    """All of a report but what is this rank's own: the time and the table of its shards."""
    found = json.loads(report.to_json())  # in strict JSON a NaN is equal to itself
    for own in ("time", "tensors", "buffers"):
        found.pop(own)
    return dict(found)


def _loss(layout: Layout, step: int, part: int, micro: int, factor: float) -> Tensor:
    index, shares = layout.share
    whole = batch(step).chunk(micro)[part]
    out = layout.model(whole.chunk(shares)[index])
    out = out.full_tensor() if isinstance(out, DTensor) else out
    return (out.square().mean() * factor) / micro * 20.0


def _named(model: nn.Module) -> dict[str, Any]:
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return dict(inner.named_parameters())


def _plant(named: dict[str, Any], plant: Plant, rank: int) -> None:
    name, index, only = plant
    if name == "loss" or named[name].grad is None or only not in (None, rank):
        return
    grad = named[name].grad
    offsets = [0] * len(index)
    if isinstance(grad, DTensor):
        _, offsets = box_of(grad)
        grad = grad._local_tensor
    local = [at - start for at, start in zip(index, offsets, strict=True)]
    if all(0 <= at < size for at, size in zip(local, grad.shape, strict=True)):
        grad[tuple(local)] = NAN


def _whole(param: Tensor) -> Tensor:
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach()


def step_of(optimizer: Any) -> str | None:
    """The error of one step, None if there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            optimizer.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def same_everywhere(value: Any) -> bool:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, repr(value))
    return len(set(every)) == 1

