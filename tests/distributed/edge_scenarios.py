"""Unusual layouts and misuse: what each rank does in `test_edges.py`; every function returns plain data."""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import nanscan
from tests.distributed.scenarios import NAN, step_of

Told = tuple[bool, str]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def data(rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(5 + rank))


def said_by(call: Any) -> str:
    """The error of a call, or its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    return "; ".join(str(w.message) for w in caught)


def sharded(values: Tensor, mesh: DeviceMesh, *placements: Any) -> nn.Parameter:
    """A parameter of ones with these values as its gradient."""
    weight = nn.Parameter(distribute_tensor(torch.ones_like(values), mesh, placements))
    weight.grad = distribute_tensor(values, mesh, placements)
    return weight


def shards_that_come_after_wrap(rank: int, how: str) -> Told:
    """The guard was made for plain parameters; a trainer then shards the model, or thaws a sharded part."""
    model = net()
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model = model if how == "replaced" else net()
    fully_shard(model)
    if how == "replaced":
        guarded.param_groups[0]["params"] = list(model.parameters())
    else:
        guarded.optimizer.add_param_group({"params": list(model.parameters())})
    model(data(rank)).square().sum().backward()
    if rank == 1:
        model[2].weight.grad.to_local()[-1, -1] = NAN
    step_of(guarded)
    return guarded.step_was_skipped, guarded.last_report.describe()


def optimizer_made_before_fully_shard(rank: int) -> str:
    model = net()
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    fully_shard(model)
    model(data(rank)).sum().backward()
    return said_by(guarded.step)


def two_in_different_order(rank: int) -> tuple[list[str | None], list[float]]:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    both = [nanscan.wrap(torch.optim.SGD([w], lr=1.0), process_group=True) for w in weights]
    for weight in weights:
        weight.grad = torch.ones(1)
    errors = [step_of(guarded) for guarded in (both if rank == 0 else both[::-1])]
    return errors, [w.item() for w in weights]


def a_group_that_lacks_shards(rank: int) -> str:
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    weight = sharded(torch.ones(4), init_device_mesh("cpu", (dist.get_world_size(),)), Shard(0))
    return said_by(lambda: nanscan.wrap(torch.optim.SGD([weight]), process_group=groups[rank]))


def ddp_whose_hook_does_not_reduce(rank: int, late: bool) -> Told:
    model = DistributedDataParallel(net())
    if not late:
        model.register_comm_hook(None, noop_hook)
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    if late:
        model.register_comm_hook(None, noop_hook)
    model(data(rank) * (NAN if rank else 1.0)).sum().backward()
    step_of(guarded)
    return guarded.step_was_skipped, str({row.rank for row in guarded.last_report.bad})


def held_back(rank: int, drop: bool, given: bool) -> list[str]:
    """Gradient accumulation in which only the last backward reduces."""
    model = net()
    fully_shard(model)
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model if given else None)
    said = []
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        loss = model(data(rank)).square().mean() / 3
        loss.backward()
        said.append(said_by(lambda loss=loss: guarded.check_microbatch(loss, drop=drop)))
    if drop:
        guarded.zero_grad()
    step_of(guarded)
    return said


def every_micro_batch_reduced(rank: int) -> tuple[list[bool], bool, float]:
    """The same with each micro-batch reduced: the bad one of rank 1 is dropped on all."""
    model = net()
    fully_shard(model)
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    dropped = []
    for micro in range(3):
        loss = (model(data(rank)) * (NAN if micro == 1 and rank == 1 else 1.0)).square().mean() / 3
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dropped.append(guarded.check_microbatch(loss, drop=True).dropped)
    step_of(guarded)
    return dropped, guarded.step_was_skipped, guarded.last_report.norm


def what_says_that_it_can_not(rank: int) -> dict[str, Any]:
    model = net()
    fully_shard(model)
    inner = torch.optim.AdamW(model.parameters())
    model(data(rank)).sum().backward()
    inner.step()
    with tempfile.TemporaryDirectory() as folder:
        said: dict[str, Any] = {
            "model": said_by(lambda: nanscan.save(model.state_dict(), f"{folder}/model.pt")),
            "optimizer": said_by(lambda: nanscan.save({"optimizer": inner.state_dict()}, f"{folder}/inner.pt")),
            "safetensors": said_by(lambda: nanscan.save(model.state_dict(), f"{folder}/model.safetensors")),
            "left": os.listdir(folder),
        }
    batch = (data(rank), torch.zeros(4, 3))
    said["preflight"] = said_by(lambda: nanscan.preflight(model, inner, batch, nn.functional.mse_loss))
    return said


def an_origin_beside_shards(rank: int) -> tuple[str, str]:
    """A model of shards is alive beside the DDP model whose step is bad; what is said if the step writes to it too."""
    beside = net()
    fully_shard(beside)
    model = DistributedDataParallel(net())
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, find_origin=True)
    model(data(rank) * (NAN if rank else 1.0)).sum().backward()
    error = step_of(guarded)

    def writes_to_shards() -> None:
        with torch.no_grad():
            for param in beside.parameters():
                param.mul_(2.0)

    return f"{error} {guarded.last_report.origin}", said_by(lambda: nanscan.find_origin(writes_to_shards, model))


def the_deciding_rank_is_interrupted(rank: int) -> str:
    def interrupt(report: Any) -> str:
        raise KeyboardInterrupt

    weight = nn.Parameter(torch.ones(1))
    guarded = nanscan.wrap(torch.optim.SGD([weight]), process_group=True, on_nonfinite=interrupt)
    weight.grad = torch.tensor([NAN])
    return said_by(guarded.step)


def a_log_that_fails_on_one_rank(rank: int) -> tuple[list[bool], float]:
    def log(report: Any) -> None:
        if rank == 1 and report.step == 0:
            raise OSError("disk full")

    weight = nn.Parameter(torch.ones(1))
    guarded = nanscan.wrap(torch.optim.SGD([weight], lr=1.0), process_group=True, log=log)
    failed = []
    for _ in range(3):
        weight.grad = torch.ones(1)
        failed.append(step_of(guarded) is not None)
    return failed, weight.item()


def other_placements(rank: int) -> list[tuple[float, list[float]]]:
    """(norm, weight after a step) where the gradient [0, 1, 2, 3] lies otherwise than its parameter."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values, found = torch.arange(4.0), []
    pairs = [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Replicate(), Partial("avg")), (Shard(0), Partial())]
    for of_weight, of_grad in pairs:
        weight = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [of_weight]))
        if of_grad.is_partial():
            weight.grad = DTensor.from_local(values, mesh, [of_grad])
        else:
            weight.grad = distribute_tensor(values, mesh, [of_grad])
        guarded = nanscan.wrap(torch.optim.SGD([weight], lr=1.0))
        step_of(guarded)
        found.append((guarded.last_report.norm, weight.full_tensor().tolist()))
    return found


def tiny_parameters(rank: int) -> Any:
    """0-dim ones, one without elements, one with fewer rows than there are ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = nn.Parameter(torch.zeros(()))
    plain.grad = torch.tensor(2.0)
    both = sharded(torch.tensor(1.0), mesh, Replicate())
    empty = sharded(torch.ones(0, 3), mesh, Shard(0))
    row = sharded(torch.full((1, 3), 2.0), mesh, Shard(0))
    named = [("plain", plain), ("both", both), ("empty", empty), ("row", row)]
    guarded = nanscan.wrap(torch.optim.SGD(named, lr=1.0, foreach=False))
    step_of(guarded)
    good = guarded.last_report.norm, guarded.last_report.numel
    both.grad = distribute_tensor(torch.tensor(NAN), mesh, [Replicate()])
    row.grad = distribute_tensor(torch.full((1, 3), NAN), mesh, [Shard(0)])
    step_of(guarded)
    return good, guarded.last_report.nan_count, [(r.name, r.rank) for r in guarded.last_report.bad]


POLICIES: dict[str, dict[str, Any]] = {
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "kept": {"reshard_after_forward": False},
    "compiled": {},
}


def policies_of_fully_shard(rank: int, name: str) -> Any:
    """(norm, norm of the same gradients by torch, row of a NaN planted on rank 1)."""
    model = net()
    for part in (model[0], model):
        fully_shard(part, **POLICIES[name])
    called = torch.compile(model, backend="eager") if name == "compiled" else model
    guarded = nanscan.wrap(torch.optim.AdamW(model.parameters()), called)
    called(data(rank)).square().sum().backward()
    theirs = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()
    step_of(guarded)
    norm = guarded.last_report.norm
    called(data(rank)).square().sum().backward()
    if rank == 1:
        model[2].weight.grad.to_local()[-1, -1] = NAN
    step_of(guarded)
    return norm, theirs, [(row.name, row.rank, row.first_bad) for row in guarded.last_report.bad]


def tied_shards(rank: int) -> tuple[float, float, int]:
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model)
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.arange(7)).square().sum().backward()
    wanted = model[0].weight.grad.full_tensor().norm().item()
    step_of(guarded)
    return guarded.last_report.norm, wanted, guarded.last_report.numel


def looks_at_shards(rank: int) -> Any:
    """`scan`, `trace` and `watch` of this rank's part."""
    model = net()
    fully_shard(model)
    watch = nanscan.watch(model)
    model(data(rank)).square().sum().backward()
    kinds = {row.kind for row in watch.rows()}
    watch.close()
    if rank == 1:
        model[2].weight.grad.to_local()[-1, -1] = NAN
    rows = [(row.name, row.first_bad, row.shape) for row in nanscan.scan(model, grads=True).bad]
    with nanscan.trace(model) as trace:
        (model(data(rank)).square() - 1e9).sqrt().sum().backward()
    return kinds, rows, trace.origin is not None and trace.origin.op


def experts(rank: int) -> tuple[float, int]:
    """Expert parallel by hand: the dense part is a replica on each rank, each expert is its own."""
    dense, expert = (torch.randn(3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 5 + rank))
    names = {
        "dense.weight": dense,
        "dense.bias": torch.zeros(2),
        "expert.weight": expert,
        "expert.bias": torch.zeros(2),
    }
    named = [(name, nn.Parameter(value)) for name, value in names.items()]
    guarded = nanscan.wrap(torch.optim.SGD(named, lr=1.0), process_group=True)
    for _, param in named:
        param.grad = torch.ones_like(param)
    step_of(guarded)
    return guarded.last_report.norm**2, guarded.last_report.numel


def a_mesh_without_this_rank(rank: int) -> tuple[Any, float, float]:
    weight = sharded(torch.tensor([3.0, 0.0, 0.0, 4.0]), DeviceMesh("cpu", [0, 1]), Shard(0))
    guarded = nanscan.wrap(torch.optim.SGD([weight], lr=1.0))
    norm = said_by(lambda: nanscan.clip_grad_norm_([weight], 100.0))
    error = step_of(guarded)
    return error, norm, guarded.last_report.norm


def a_shard_that_can_not_be_clipped(rank: int) -> str:
    weight = sharded(torch.ones(4), init_device_mesh("cpu", (2, 1)), Shard(0), Replicate())
    if rank == 1:
        weight.grad._local_tensor.untyped_storage().resize_(0)
    return said_by(lambda: nanscan.clip_grad_norm_([weight], 1.0))


def three_dimensions(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    values = torch.arange(35.0).reshape(7, 5)
    first = sharded(values, mesh, Shard(0), Replicate(), Shard(1))
    second = sharded(values, mesh, Shard(0), Shard(0), Shard(0))
    guarded = nanscan.wrap(torch.optim.SGD([("first", first), ("second", second)], lr=1.0))
    step_of(guarded)
    norm = guarded.last_report.norm
    values[6, 4] = NAN
    for weight in (first, second):
        weight.grad = distribute_tensor(values, mesh, weight.placements)
    step_of(guarded)
    return norm, float((2 * torch.arange(35.0).square().sum()).sqrt()), [r.first_bad for r in guarded.last_report.bad]


def meshes_that_overlap(rank: int) -> tuple[str | None, float]:
    """Made by hand, so that no common mesh says which ranks train together."""
    groups = [dist.new_subgroups_by_enumeration(pairs)[0] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    weights = [sharded(torch.ones(4), DeviceMesh.from_group(group, "cpu"), Shard(0)) for group in groups]
    guarded = nanscan.wrap(torch.optim.SGD([("a", weights[0]), ("b", weights[1])], lr=1.0, foreach=False))
    error = step_of(guarded)
    return error, guarded.last_report.norm
