"""What each rank does in the tests of `tests/distributed`; every function gets the rank and returns plain data."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
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


def _sharded(rank: int, values: list[float], grad: list[float], **options: Any) -> tuple[Any, Any]:
    """One DTensor of all the ranks' parts under a guarded SGD, with a gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.tensor(values), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.tensor(grad), mesh, [Shard(0)])
    return weight, nanscan.wrap(torch.optim.SGD([("w", weight)], lr=1.0), **options)


def zero_on_shards_and_replicas(rank: int) -> Any:
    weight, optimizer = _sharded(rank, [1.0] * 5, [1.0, 2.0, 3.0, 4.0, NAN], on_nonfinite="zero", clip_norm=100.0)
    both = nn.Parameter(distribute_tensor(torch.ones(2), weight.device_mesh, [Replicate()]))
    both.grad = distribute_tensor(torch.ones(2), weight.device_mesh, [Replicate()])
    optimizer.add_param_group({"params": [("both", both)]})
    if rank == 1:
        both.grad._local_tensor[0] = NAN
    step_of(optimizer)
    return _whole(weight).tolist(), _whole(both).tolist(), both._local_tensor.tolist(), optimizer.last_report.nan_count


def raise_together(rank: int) -> Any:
    weight, optimizer = _sharded(rank, [1.0] * 4, [1.0, 2.0, 3.0, NAN], on_nonfinite="raise")
    return step_of(optimizer), _whole(weight).tolist(), weight.grad is not None


def one_decides(rank: int) -> Any:
    asked: list[str] = []

    def decide(report: nanscan.StepReport) -> str:
        asked.append(report.describe())
        return "zero"

    weight, optimizer = _sharded(rank, [1.0] * 4, [1.0, 2.0, 3.0, NAN], on_nonfinite=decide)
    step_of(optimizer)
    return asked, _whole(weight).tolist()


def one_rank_without_gradients(rank: int) -> Any:
    weight, optimizer = _sharded(rank, [1.0] * 4, [3.0, 0.0, 0.0, 4.0])
    weight.grad = weight.grad if rank == 0 else None
    error = step_of(optimizer)
    return error, optimizer.last_report.norm


def one_rank_can_not_scan(rank: int) -> Any:
    weight, optimizer = _sharded(rank, [1.0] * 4, [1.0] * 4)
    if rank == 1:
        weight.grad._local_tensor.untyped_storage().resize_(0)
    return step_of(optimizer), weight._local_tensor.tolist()


def parameters_go_bad(rank: int) -> Any:
    weight, optimizer = _sharded(rank, [1.0, 1.0, 1.0, NAN], [1.0] * 4, check_params_every=1, on_nonfinite="raise")
    error = step_of(optimizer)
    rows = [(row.name, row.rank, row.first_bad, row.shape) for row in optimizer.last_report.parameters]
    return error, rows, same_everywhere(rows)


def several_bad_tensors(rank: int) -> Any:
    """Every rank hears of all of them: two collectives more, on such steps only."""
    layout = LAYOUTS["fsdp"](rank, dist.get_world_size())
    optimizer = nanscan.wrap(layout.inner, layout.model)
    _loss(layout, 0, 0, 1, NAN).backward()
    with profile(activities=[ProfilerActivity.CPU]) as spent:
        step_of(optimizer)
    report = optimizer.last_report
    return (
        collectives(spent),
        [(row.name, row.rank) for row in report.bad],
        report.nan_count,
        same_everywhere(told(report)),
    )


def a_loss_on_one_rank_of_ddp(rank: int) -> Any:
    layout = LAYOUTS["ddp"](rank, dist.get_world_size())
    optimizer = nanscan.wrap(layout.inner, layout.model)
    _loss(layout, 0, 0, 1, 1.0).backward()
    optimizer.observe(NAN if rank == 1 else 0.5)
    with profile(activities=[ProfilerActivity.CPU]) as spent:
        step_of(optimizer)
    return collectives(spent), optimizer.step_was_skipped, optimizer.last_report.describe()


def what_is_automatic(rank: int) -> Any:
    size = dist.get_world_size()
    ddp, fsdp, plain = LAYOUTS["ddp"](rank, size), LAYOUTS["fsdp"](rank, size), optimizer(fresh().parameters())
    beside = nn.Parameter(torch.ones(2))  # trained, but not reduced by DDP
    mixed = torch.optim.SGD([*ddp.model.parameters(), beside], lr=0.1)
    found = {
        "ddp": nanscan.wrap(ddp.inner, ddp.model),
        "ddp and more": nanscan.wrap(mixed, ddp.model),
        "ddp off": nanscan.wrap(LAYOUTS["ddp"](rank, size).inner, ddp.model, process_group=False),
        "fsdp": nanscan.wrap(fsdp.inner),
        "fsdp off": nanscan.wrap(LAYOUTS["fsdp"](rank, size).inner, process_group=False),
        "plain": nanscan.wrap(plain),
    }
    agreements = {name: guarded._agreement for name, guarded in found.items()}
    return {name: None if a is None else (a.ranks, a.equal_gradients) for name, a in agreements.items()}


def refused(rank: int) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    layout = LAYOUTS["fsdp"](rank, dist.get_world_size())
    attempts = {
        "find_origin": lambda: nanscan.find_origin(lambda: None),
        "wrap find_origin": lambda: nanscan.wrap(layout.inner, layout.model, find_origin=True),
    }
    texts = {name: _refusal(attempt) for name, attempt in attempts.items()}
    flat = FullyShardedDataParallel(fresh(), device_id=torch.device("cpu"))
    texts["fsdp1"] = _refusal(lambda: nanscan.wrap(optimizer_of(flat), flat))
    return texts


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return optimizer(model.parameters())


def _refusal(attempt: Any) -> str:
    try:
        attempt()
    except NotImplementedError as error:
        return str(error)
    return ""


def scaled(rank: int, name: str, own: bool) -> Any:
    """A run under a gradient scaler, with a NaN on rank 1 at the second of three steps."""
    layout = LAYOUTS[name](rank, dist.get_world_size())
    scaler: Any = (nanscan if own else torch.amp).GradScaler("cpu", init_scale=4.0)
    guarded = nanscan.wrap(layout.inner, layout.model, clip_norm=0.5)
    seen = []
    for step in range(3):
        guarded.zero_grad()
        scaler.scale(_loss(layout, step, 0, 1, 1.0)).backward()
        if step == 1:
            _plant(_named(layout.model), ("down.weight", (4, 3), None), rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaler.step(guarded)
        scaler.update()
        seen.append((guarded.step_was_skipped, scaler.get_scale(), guarded.last_report.finite_norm))
    return seen, same_everywhere(seen)


def adaptive(rank: int, name: str) -> Any:
    layout = LAYOUTS[name](rank, dist.get_world_size())
    clip = nanscan.AdaptiveClip("zclip", warmup=2)
    guarded = nanscan.wrap(layout.inner, layout.model, clip_norm=clip, on_spike="warn")
    seen = []
    for step in range(6):
        guarded.zero_grad()
        loss = _loss(layout, step, 0, 1, 500.0 if step == 5 else 1.0)
        loss.backward()
        guarded.observe(loss)
        step_of(guarded)
        seen.append((guarded.last_report.norm, guarded.last_report.clip_factor))
    return seen, same_everywhere(seen)


def clip_as_torch(rank: int, name: str, order: float) -> Any:
    """(our norm, torch's or its error, largest difference of the gradients afterwards, type of the norm)."""
    ours, theirs = (LAYOUTS[name](rank, dist.get_world_size()) for _ in range(2))
    for layout in (ours, theirs):
        _loss(layout, 0, 0, 1, 1.0).backward()
        layout.reduce()
    norm = nanscan.clip_grad_norm_(ours.model.parameters(), 0.5, order)
    alone_model = fresh()
    alone_model.zero_grad()
    (alone_model(batch(0)).square().mean() * 20.0).backward()
    wanted = torch.nn.utils.clip_grad_norm_(alone_model.parameters(), 0.5, order)
    try:
        other: Any = torch.nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.5, order)
        other = other.full_tensor() if isinstance(other, DTensor) else other
        other = float(other)
    except Exception as error:
        other = f"{type(error).__name__}: {error}"
    pairs = zip(_named(ours.model).values(), alone_model.parameters(), strict=True)
    gap = max(float((_whole(p.grad.redistribute(placements=p.placements) if isinstance(p.grad, DTensor) else p.grad)
                     - q.grad).abs().max()) for p, q in pairs)  # fmt: skip
    return float(norm), float(wanted), other, gap, type(norm).__name__


def clip_with_a_nan(rank: int) -> Any:
    weight, _ = _sharded(rank, [1.0] * 4, [3.0, 4.0, 5.0, NAN])
    before = weight.grad._local_tensor.clone()
    norm = nanscan.clip_grad_norm_([weight], 1.0)
    same = torch.equal(weight.grad._local_tensor, before) or rank == 1
    try:
        nanscan.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
    except nanscan.NonFiniteError as error:
        return float(norm), same, str(error)
