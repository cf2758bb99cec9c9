"""Ranks that are not alike, and a second process group: what each rank does; every function returns plain data."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import nanscan
from tests.distributed.edge_scenarios import data, net, said_by
from tests.distributed.scenarios import NAN, collectives, step_of, told

Seen = list[tuple[str | None, bool, dict[str, Any]]]


def weights_of(model: nn.Module) -> list[float]:
    """The sum of each parameter: the same on ranks whose weights are."""
    return [p.detach().sum().item() for p in model.parameters()]


def seen_by(guarded: Any, names: dict[str, Any], bad: str, on: int | None, rank: int) -> Seen:
    """A good step, one with a NaN in a gradient on one rank (None: on all that have it), and a good one."""
    seen = []
    for step in range(3):
        for param in names.values():
            if param.requires_grad:
                param.grad = torch.full_like(param, 2.0)
        if step == 1 and bad in names and names[bad].grad is not None and on in (None, rank):
            names[bad].grad.view(-1)[-1] = NAN
        error = step_of(guarded)
        seen.append((error, guarded.step_was_skipped, told(guarded.last_report)))
    return seen


def plain(rank: int, how: str, bad: str, on: int | None) -> tuple[Seen, list[float]]:
    """Plain replicas with `process_group=True`; on rank 1 the bias is frozen, or absent, or not optimized."""
    names = {name: nn.Parameter(torch.ones(3)) for name in ("weight", "bias")}
    if rank == 1 and how == "frozen":
        names["bias"].requires_grad_(False)
    if rank == 1 and how == "absent":
        del names["bias"]
    optimized = [(name, p) for name, p in names.items() if not (rank == 1 and how == "left out" and name == "bias")]
    guarded = nanscan.wrap(torch.optim.SGD(optimized, lr=0.25), process_group=True)
    return seen_by(guarded, names, bad, on, rank), names["weight"].tolist()


def ddp_left_out(rank: int) -> Any:
    """DDP makes gradients equal; rank 1's optimizer lacks a parameter whose gradient is NaN on all."""
    model = DistributedDataParallel(net())
    names = dict(model.module.named_parameters())
    mine = [(name, p) for name, p in names.items() if rank == 0 or name != "4.bias"]
    guarded = nanscan.wrap(torch.optim.SGD(mine, lr=0.1), model)
    seen = []
    for step in range(3):
        model.zero_grad()
        model(data(rank)).square().sum().backward()
        if step == 1:
            names["4.bias"].grad[0] = NAN
        with profile(activities=[ProfilerActivity.CPU]) as spent:
            error = step_of(guarded)
        report = told(guarded.last_report)
        seen.append((error, guarded.step_was_skipped, report["norm"], report["bad"], len(collectives(spent)) > 0))
    return seen, names["0.weight"].tolist()


def partly_reduced(rank: int) -> nn.ModuleDict:
    """A part of the model is reduced over all ranks, another over a group of its own, as experts are."""
    mine = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    parts = {"all": DistributedDataParallel(net()), "own": DistributedDataParallel(net(), process_group=mine)}
    return nn.ModuleDict(parts)


def ddp_of_two_groups(rank: int) -> Any:
    """A NaN at step 1 in the part that rank 1 alone reduces."""
    model = partly_reduced(rank)
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(3):
        guarded.zero_grad()
        factor = NAN if step == 1 and rank == 1 else 1.0
        (model["all"](data(rank)).sum() + (model["own"](data(rank)) * factor).sum()).backward()
        step_of(guarded)
    return [r.action for r in guarded.history], [told(r) for r in guarded.history], weights_of(model["all"])


def saved_with_parts_apart(rank: int, folder: str, how: str) -> str:
    """DDP does not keep a part equal on all ranks, and it has other values on each."""
    if how == "ignored":
        inner = nn.ModuleDict({"own": net()})
        ignored = [name for name, _ in inner.named_parameters() if name.startswith("own.4")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ignored)
        model: Any = DistributedDataParallel(inner)
    else:
        inner = model = partly_reduced(rank)
    with torch.no_grad():
        next(p for name, p in inner.named_parameters() if name.startswith("own") and "4.bias" in name).fill_(rank)
    with nanscan.CheckpointManager(folder, background=False, process_group=True) as manager:
        return said_by(lambda: manager.save(1, model=model))


def only_one_rank_observes(rank: int) -> Any:
    """The loss is observed where it is printed: at the first step that is an error at once, on both."""
    model = DistributedDataParallel(net())
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss = model(data(rank)).square().mean()
    loss.backward()
    if rank == 0:
        guarded.observe(loss)
    return step_of(guarded)


def wrapped_without_ddp(rank: int, how: str) -> Any:
    """The guard does not hear of the group: (what it says, actions of three steps); at the second rank 1 has a NaN."""
    model = net()
    options = {"process_group": {"false": False, "true": True}[how]} if how in ("false", "true") else {}
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
    recovery = nanscan.Recovery(model, guarded, snapshot_every=1) if how == "recovery" else None
    ddp, said = DistributedDataParallel(model), []
    for step in range(3):
        guarded.zero_grad()
        loss = ddp(data(rank)).square().mean()
        loss.backward()
        if how not in ("no loss", "recovery"):
            said.append(said_by(lambda: guarded.observe(NAN if step == rank == 1 else 1.0)))  # noqa: B023
        elif how == "no loss" and step == rank == 1:
            model[0].bias.grad[0] = NAN
        said.append(said_by(guarded.step))
        if recovery is not None:
            said.append(said_by(lambda: recovery.step(NAN if step == rank == 1 else 1.0)))  # noqa: B023
    return [text for text in said if text], [r.action for r in guarded.history]


def origin_on_one_rank(rank: int, observed: bool) -> Any:
    """DDP with find_origin; the square root of a negative number is taken on rank 1 alone, at step 1."""

    gc.collect()  # shards of other scenarios: find_origin looks for them in the whole program

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x).square() - x[0, 0].clamp(min=1e6).sub(1e6)).sqrt()

    model = DistributedDataParallel(Root())
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, find_origin=True)
    found = []
    for step in range(3):
        guarded.zero_grad()
        x = data(rank)
        if rank == 1 and step == 1:
            x[0, 0] = 2e6
        loss = model(x).sum()
        loss.backward()
        if observed:
            guarded.observe(loss)
        error = step_of(guarded)
        found.append((error, guarded.step_was_skipped, told(guarded.last_report)))
    return found, weights_of(model)


def searched_by_hand(rank: int) -> Any:
    """`nanscan.find_origin(step)` of DDP, called by all ranks; then training goes on as if nothing had been."""
    gc.collect()
    model, twin = (DistributedDataParallel(net()) for _ in range(2))
    origins = []
    for step in range(3):
        x = data(rank)
        for one in (model, twin):
            one.zero_grad()
            if one is model:

                def step_fn(x: torch.Tensor = x, step: int = step) -> None:
                    bad = NAN if rank == 1 and step == 1 else 1.0
                    (model(x) * bad).sum().backward()

                origin = nanscan.find_origin(step_fn, model)
                origins.append(origin and (origin.op, origin.kind))
            one(x).square().sum().backward()
            with torch.no_grad():
                for param in one.parameters():
                    param -= 0.1 * param.grad
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    return origins, same


def a_weight_that_is_bad_on_one_rank(rank: int) -> Any:
    """A NaN in a weight of rank 1 reaches all gradients by DDP: (skipped, the names and ranks of what was bad)."""
    model = DistributedDataParallel(net())
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with torch.no_grad():
        model.module[4].bias[0] = NAN if rank == 1 else 0.0
    model(data(rank)).square().mean().backward()
    step_of(guarded)
    return guarded.step_was_skipped, [(row.name, row.rank) for row in guarded.last_report.parameters]


def inputs_that_run_out(rank: int) -> Any:
    """Rank 0 has one batch more: `Join` keeps DDP going; the guard of rank 1 has no more steps to share."""
    model = DistributedDataParallel(net())
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with torch.distributed.algorithms.Join([model]):
        for step in range(4 - rank):
            guarded.zero_grad()
            model(data(rank) * (NAN if step == 1 and rank == 1 else 1.0)).sum().backward()
            step_of(guarded)
    return guarded.skipped_steps, [report.action for report in guarded.history]


def logged(rank: int, folder: str) -> Any:
    """Two ranks that train, save, refuse a save and go back, with one log for both and one for each."""
    model = net()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guarded = nanscan.wrap(optimizer, model, log=[f"{folder}/run.jsonl", f"{folder}/rank{rank}.jsonl"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with nanscan.CheckpointManager(f"{folder}/checkpoints", every_steps=2, background=False) as manager:
            recovery = nanscan.Recovery(model, guarded, snapshot_every=1, patience=2)
            for step in range(6):
                guarded.zero_grad()
                model(data(rank)).square().mean().backward()
                if step in (3, 4) and rank == 1:
                    model[2].weight.grad.to_local()[-1, -1] = NAN
                guarded.step()
                recovery.step()
                manager.save(step + 1, model=model, optimizer=guarded)
            weight = model[4].weight.to_local().detach()
            if rank == 1:
                weight.fill_(NAN)
            try:
                manager.save(8, model=model, optimizer=guarded)
            except nanscan.NonFiniteError:
                return True
    return False


def variants_of_ddp(rank: int, how: str) -> Any:
    """A NaN in rank 1's batch at step 1, under what people put around or into DDP: (skips, norms, weights)."""
    torch.manual_seed(3)
    inner: Any = Branches()
    model = DistributedDataParallel(
        inner,
        gradient_as_bucket_view=how == "bucket view",
        static_graph=how == "static graph",
        find_unused_parameters=how == "unused on one rank",
    )
    called: Any = torch.compile(model, backend="eager") if how == "compiled" else model
    guarded = nanscan.wrap(torch.optim.AdamW(inner.parameters(), lr=0.1), called, clip_norm=0.5)
    for step in range(4):
        guarded.zero_grad(set_to_none=how != "bucket view")
        x = data(rank) * (NAN if step == 1 and rank == 1 else 1.0)
        called(x, how != "unused on one rank" or rank == 0).square().mean().backward()
        step_of(guarded)
    return [r.skipped for r in guarded.history], [told(r)["norm"] for r in guarded.history], weights_of(inner)


class Branches(nn.Module):
    """Has no len(), and a branch that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        return out + self.second(x) if both else out
