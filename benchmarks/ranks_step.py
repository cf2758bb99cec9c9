"""What each process of `bench_distributed` runs: one step on DTensors, timed and counted in turns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

import nanscan

TENSORS, SHAPE = 100, (256, 256)
MAX_NORM = 1e9  # nothing is clipped: what is compared is finding the norm and agreeing on it


def measured(rank: int, rounds: int) -> dict[str, Any]:
    """Seconds of each command by round, and the collectives of one call, by command."""
    commands = _commands()
    order = [name for name in commands for _ in range(rounds)]
    random.Random(0).shuffle(order)  # the same on every rank
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for name in [*commands, *order]:
        dist.barrier()
        started = time.perf_counter()
        commands[name]()
        samples[name].append(time.perf_counter() - started)
    return {name: (times[1:], _collectives(commands[name])) for name, times in samples.items()}


def _commands() -> dict[str, Callable[[], Any]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sets = [[_parameter(mesh) for _ in range(TENSORS)] for _ in range(2)]
    plain = torch.optim.SGD(sets[0], lr=1e-9)
    guarded = nanscan.wrap(torch.optim.SGD(sets[1], lr=1e-9), clip_norm=MAX_NORM)

    few, many = (torch.ones(count, dtype=torch.float64) for count in (5 + 2 * dist.get_world_size(), 19))

    def reduced() -> list[float]:
        dist.all_reduce(few.fill_(1.0))
        return list(few.tolist())

    def gathered() -> list[list[float]]:
        every = many.new_empty((dist.get_world_size(), len(many)))
        dist.all_gather(list(every.unbind()), many)
        return list(every.tolist())

    def as_torch_does() -> None:
        torch.nn.utils.clip_grad_norm_(sets[0], MAX_NORM).full_tensor().item()  # type: ignore[attr-defined]
        plain.step()

    return {
        "plain step": plain.step,
        "guarded step": guarded.step,
        "torch clip + step": as_torch_does,
        "torch clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(sets[0], MAX_NORM).full_tensor().item(),
        "nanscan clip_grad_norm_": lambda: nanscan.clip_grad_norm_(sets[1], MAX_NORM).item(),
        "all_reduce, the guard's": reduced,
        "all_gather of 152 bytes": gathered,
    }


def _parameter(mesh: Any) -> nn.Parameter:
    param = nn.Parameter(distribute_tensor(torch.ones(SHAPE), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(SHAPE), mesh, [Shard(0)])
    return param


def _collectives(command: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as spent:
        command()
    return sum(event.count for event in spent.key_averages() if event.key.startswith("c10d::"))
