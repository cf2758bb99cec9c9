"""`clip_grad_norm_` on values and shards that are hard, ours and torch's; every function returns plain data."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import nanscan


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


HARD: dict[str, Callable[[], tuple[Tensor, float]]] = {  # a gradient and the order of the norm
    "bfloat16": lambda: (random(96, 65).bfloat16(), 2.0),
    "float16": lambda: (torch.full((512, 512), 200.0).half(), 2.0),
    "large": lambda: (random(6, 5) * 1e20, 2.0),
    "small": lambda: (random(6, 5) * 1e-25, 2.0),
    "empty": lambda: (random(1, 5), 2.0),
    "empty inf": lambda: (random(1, 5), float("inf")),
}


def clip_hard(rank: int, name: str) -> tuple[float, float, float | str, float, float]:
    """(our norm, the right one in float64, torch's or its error, gap of our clipped gradient, the guard's norm)."""
    whole, order = HARD[name]()
    wanted = torch.linalg.vector_norm(whole.double(), order).item()
    largest, share = (wanted / 2, 0.5) if wanted > 1e-3 else (1.0, 1.0)
    weights = []
    for limit in (60, 3):  # torch's may raise on one rank alone: the other must not wait long
        group = dist.new_group(timeout=datetime.timedelta(seconds=limit))
        mesh = DeviceMesh.from_group(group, "cpu")
        weights.append(nn.Parameter(distribute_tensor(torch.ones_like(whole), mesh, [Shard(0)])))
        weights[-1].grad = distribute_tensor(whole, mesh, [Shard(0)])
    guarded = nanscan.wrap(torch.optim.SGD(weights[:1], lr=0.0))
    guarded.step()
    report: Any = guarded.last_report
    norm = nanscan.clip_grad_norm_(weights[:1], largest, order)
    clipped: Any = weights[0].grad
    gap = torch.linalg.vector_norm(clipped.full_tensor().double() - whole.double() * share).item()
    dist.barrier()
    try:
        theirs: Any = torch.nn.utils.clip_grad_norm_(weights[1:], largest, order)
        theirs = float(theirs.full_tensor() if isinstance(theirs, DTensor) else theirs)
    except Exception as error:
        theirs = f"{type(error).__name__}: {error}"
    return float(norm), wanted, theirs, gap / torch.linalg.vector_norm(whole.double()).item(), report.norm


def clip_unusual(rank: int, order: float, placement: str, beside: bool) -> list[tuple[float, list[list[float]]]]:
    """Norm and clipped gradients of four gradients in one piece, as DTensors (some `beside` as plain ones), torch's."""
    wholes = [
        torch.tensor(v) for v in ([1.0, 7.0, 3.0], [0.0] * 3 if order == 0 else [9.0] * 3, [2.0, 2.0, 2.0], [5.0])
    ]
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    where = [Shard(0) if placement == "shards" else Replicate()]

    def parameter(at: int, sharded: bool) -> nn.Parameter:
        made = [distribute_tensor(v, mesh, where) if sharded else v for v in (torch.ones_like(wholes[at]), wholes[at])]
        weight = nn.Parameter(made[0])
        weight.grad = made[1].clone()
        return weight

    found = []
    for clip, plain in (
        (torch.nn.utils.clip_grad_norm_, range(4)),
        (nanscan.clip_grad_norm_, (1, 2) if beside else ()),
    ):
        weights = [parameter(at, at not in plain) for at in range(4)]
        norm: Any = clip(weights, 0.1, order)
        grads: list[Any] = [weight.grad for weight in weights]
        whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in (norm, *grads)]
        found.append((whole[0].item(), [value.tolist() for value in whole[1:]]))
    return found
