"""The other parts of nanscan on shards and on DDP, one for each row of the table in docs/distributed.md."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import nanscan
from tests.distributed.edge_scenarios import data, net, said_by
from tests.distributed.layouts import LAYOUTS
from tests.distributed.scenarios import NAN, _loss, collectives, step_of


def sharded() -> nn.Module:
    model = net()
    fully_shard(model)
    return model


def agc(rank: int) -> Any:
    """On shards, and on DDP: (what it says, clip factors and weights of DDP)."""
    clip = nanscan.AdaptiveClip("agc")
    shards = sharded()
    said = said_by(lambda: stepped(nanscan.wrap(torch.optim.SGD(shards.parameters()), shards, clip_norm=clip), shards))
    model = DistributedDataParallel(net())
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, clip_norm=nanscan.AdaptiveClip("agc"))
    for step in range(3):
        guarded.zero_grad()
        (model(data(rank)) * (NAN if step == 1 and rank == 1 else 100.0)).square().sum().backward()
        step_of(guarded)
    return said, guarded.skipped_steps, [p.detach().sum().item() for p in model.parameters()]


def stepped(guarded: Any, model: nn.Module) -> None:
    model(torch.ones(4, 6)).sum().backward()
    guarded.step()


def torch_scaler_beside_plain_tensors(rank: int) -> str:
    """torch's own `GradScaler`, whose check takes the tensors of all parameters together."""
    layout = LAYOUTS["mixed"](rank, dist.get_world_size())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # type: ignore[attr-defined]
    guarded = nanscan.wrap(layout.inner, layout.model)
    scaler.scale(_loss(layout, 0, 0, 1, 1.0)).backward()
    return said_by(lambda: scaler.step(guarded))


def clip_alone(rank: int) -> tuple[list[str], str]:
    model = sharded()
    model(data(rank)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as spent:
        norm = nanscan.clip_grad_norm_(model.parameters(), 1.0)
    return collectives(spent), type(norm).__name__


def look_only_here(rank: int) -> list[str]:
    """The collectives of scan, trace and watch around nothing that has any."""
    model = sharded()
    model(data(rank)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as spent:
        nanscan.scan(model, grads=True).describe()
        nanscan.watch(model).close()
        with nanscan.trace(model):
            pass
    return collectives(spent)


def preflight_without_a_batch(rank: int) -> list[str]:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 1:
        model[2].weight.to_local().detach()[-1, -1] = NAN  # type: ignore[index, union-attr, operator]
    return [f"{found.code} {found.where}: {found.message}" for found in nanscan.preflight(model, optimizer)]


def torch_state_dict(rank: int) -> tuple[int, int, bool]:
    """torch's functions make missing state by a step of their own: (steps of the guard, entries, weights unchanged)."""
    model = sharded()
    guarded = nanscan.wrap(torch.optim.AdamW(model.parameters()), model)
    before = [p.to_local().clone() for p in model.parameters()]  # type: ignore[operator]
    state = get_optimizer_state_dict(model, guarded.optimizer)
    same = all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))  # type: ignore[operator]
    return len(guarded.history), len(state["state"]), same


def find_origin_of_shards(rank: int) -> tuple[str, str]:
    model = sharded()
    by_wrap = said_by(lambda: nanscan.wrap(torch.optim.SGD(model.parameters()), model, find_origin=True))
    return said_by(lambda: nanscan.find_origin(lambda: model(data(rank)).sum().backward(), model)), by_wrap
