"""Steps on which anything may happen on any rank, told by a sum where it fits and, by a twin, always in full."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

import nanscan
from tests.distributed.scenarios import NAN, collectives, step_of, told

STEPS = 30
INF = float("inf")


def random_steps(rank: int, seed: int) -> list[tuple[dict[str, Any], dict[str, Any], list[str]]]:
    """(report, the twin's, collectives) of each step."""
    chance = random.Random(seed)  # the same on every rank
    twins = [_parameters() for _ in range(2)]
    brief, full = [nanscan.wrap(torch.optim.SGD(list(names.items()), lr=0.01)) for names in twins]
    told_in_full: Any = vars(full)["_agreement"]._brief
    told_in_full.findings = lambda own, sums: None
    seen = []
    for step in range(STEPS):
        for names in twins:
            _set_gradients(names, step, rank)
        losses = _happens(twins, chance, rank)
        brief.observe(losses)
        full.observe(losses)
        with profile(activities=[ProfilerActivity.CPU]) as spent:
            error = step_of(brief)
        assert error == step_of(full), error
        seen.append((told(brief.last_report), told(full.last_report), collectives(spent)))
    return seen


def _parameters() -> dict[str, nn.Parameter]:
    """Shards that are empty on some ranks, a replica on the mesh, and a plain tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sizes = {"long": [11, 2], "short": [1], "both": [3]}
    laid = {
        name: distribute_tensor(torch.ones(size), mesh, [Replicate() if name == "both" else Shard(0)])
        for name, size in sizes.items()
    }
    return {name: nn.Parameter(value) for name, value in {**laid, "plain": torch.ones(4)}.items()}


def _local(value: Any) -> Tensor:
    return value._local_tensor if hasattr(value, "_local_tensor") else value  # type: ignore[no-any-return]


def _set_gradients(names: dict[str, nn.Parameter], step: int, rank: int) -> None:
    for number, (name, param) in enumerate(names.items()):
        shared = name in ("both", "plain")
        generator = torch.Generator().manual_seed(100 * step + 10 * number + (0 if shared else rank))
        param.grad = torch.zeros_like(param)
        grad = _local(param.grad)
        grad.copy_(10.0 ** (step % 9) * torch.randn(grad.shape, generator=generator))


def _happens(twins: list[dict[str, nn.Parameter]], chance: random.Random, rank: int) -> Tensor:
    """Nothing; or a NaN or Inf in gradients or the loss of some ranks; or gradients that are not there."""
    ranks = [chance.random() < 0.5 for _ in range(dist.get_world_size())]
    event = chance.choice(["nothing", "nothing", "one", "one", "some", "loss", "no gradient", "no gradient anywhere"])
    value, name = chance.choice([NAN, INF, -INF]), chance.choice(list(twins[0]))
    if event == "one":
        only = chance.randrange(len(ranks))
        ranks = [other == only for other in range(len(ranks))]
    if not ranks[rank] and event != "no gradient anywhere":
        return torch.tensor(0.5)
    for names in twins:
        if event in ("no gradient", "no gradient anywhere"):
            names[name].grad = None
        for each in [name] if event == "one" else list(names) if event == "some" else []:
            _local(names[each].grad).view(-1)[-1:] = value
    return torch.tensor(value if event == "loss" else 0.5)
