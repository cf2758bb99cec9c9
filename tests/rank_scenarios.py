"""What each rank does in the tests of `process_group=`; every function runs on both ranks and returns plain data."""

from __future__ import annotations

import copy
import datetime
import pickle
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import nanscan
from tests.guarded import NAN, bits


def _weight(rank: int, grad: list[float] | None, on_rank_1: list[float] | None, **options: Any) -> tuple[Tensor, Any]:
    """One weight of ones under a guarded SGD, with another gradient on rank 1."""
    weight = nn.Parameter(torch.ones(len(grad or on_rank_1 or [0.0])))
    inner = torch.optim.SGD([("w", weight)], lr=0.1)
    optimizer = nanscan.wrap(inner, **{"process_group": True, **options})
    own = on_rank_1 if rank else grad
    weight.grad = None if own is None else torch.tensor(own)
    return weight, optimizer


def _step(optimizer: Any) -> tuple[list[str], str | None]:
    """The texts of the warnings, and of the error, of one step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            optimizer.step()
        except Exception as error:
            return [str(w.message) for w in caught], f"{type(error).__name__}: {error}"
    return [str(w.message) for w in caught], None


def nan_on_one_rank(rank: int) -> Any:
    weight, optimizer = _weight(rank, [1.0, 2.0], [1.0, NAN])
    said, error = _step(optimizer)
    report = optimizer.last_report
    return {
        "weight": weight.tolist(),
        "grad": weight.grad,
        "skipped": optimizer.step_was_skipped,
        "said": said,
        "error": error,
        "rows": [(row.name, row.rank, row.nan_count, row.first_bad, row.shape) for row in report.bad],
        "ranks of the table": [row.rank for row in report.tensors],
        "counts": (report.nan_count, report.inf_count, report.finite_norm),
        "json": type(report).from_dict(report.to_dict()) == report if rank else True,
    }


def bad_on_both_ranks(rank: int) -> Any:
    _, optimizer = _weight(rank, [float("inf"), NAN], [1.0, NAN], on_nonfinite=lambda report: "skip")
    _step(optimizer)
    report = optimizer.last_report
    return report.nan_count, report.inf_count, report.describe()


def collectives_of_good_and_bad_steps(rank: int) -> Any:
    weight, optimizer = _weight(rank, [3.0, 4.0], [3.0, 4.0], clip_norm=1.0)
    counted = []
    for bad in (False, False, True, False):
        weight.grad = torch.tensor([3.0, NAN if bad and rank else 4.0])
        optimizer.observe(0.5)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            _step(optimizer)
        calls = [
            event.key for event in seen.key_averages() for _ in range(event.count) if event.key.startswith("c10d::")
        ]
        counted.append(calls)
    return counted, optimizer.skipped_steps


def ddp_with_nan_planted_after_backward(rank: int) -> Any:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = nanscan.wrap(inner, model, clip_norm=0.5, process_group=dist.group.WORLD)
    factors = []
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + rank))).square().sum().backward()
        if step == 2 and rank == 1:
            model.module[2].bias.grad[1] = NAN
        before = bits(list(model.parameters()))
        _step(optimizer)
        factors.append(optimizer.last_report.clip_factor)
        if step == 2:
            unchanged = bits(list(model.parameters())) == before
            rows = [(row.name, row.rank) for row in optimizer.last_report.bad]
    return {
        "weights": bits(list(model.parameters())),
        "state": bits(inner.state_dict()["state"]),
        "factors": factors,
        "skipped": (optimizer.skipped_steps, optimizer.first_skipped_step),
        "unchanged": unchanged,
        "rows": rows,
    }


def raise_on_all(rank: int) -> Any:
    weight, optimizer = _weight(rank, [1.0], [NAN], on_nonfinite="raise")
    return _step(optimizer)[1], weight.tolist(), weight.grad is not None


def give_up_together(rank: int) -> Any:
    weight, optimizer = _weight(rank, None, None, max_consecutive_skips=3)
    errors = []
    for _ in range(3):
        weight.grad = torch.tensor([NAN if rank else 1.0])
        errors.append((_step(optimizer)[1] or "")[:16])
    return errors, list(optimizer._record.offenders)


def a_function_decides_once(rank: int) -> Any:
    asked = []

    def decide(report: Any) -> str:
        asked.append(report.bad[0].rank)
        return "zero"

    weight, optimizer = _weight(rank, [1.0, 2.0, 3.0], [1.0, NAN, 3.0], on_nonfinite=decide, clip_norm=100.0)
    _step(optimizer)
    return asked, weight.tolist(), optimizer.last_report.action


def a_function_that_fails(rank: int) -> Any:
    def decide(report: Any) -> str:
        return "stop"

    weight, optimizer = _weight(rank, [1.0], [NAN], on_nonfinite=decide)
    return _step(optimizer)[1], weight.tolist()


def zero_with_expanded_and_missing_gradients(rank: int) -> Any:
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([first, second], lr=1.0)
    optimizer = nanscan.wrap(inner, on_nonfinite="zero", process_group=True)
    first.grad = torch.tensor([[1.0], [2.0]]).expand(2, 2) if rank == 0 else torch.tensor([[NAN, 1.0], [2.0, 2.0]])
    second.grad = None if rank == 0 else torch.tensor([NAN, 0.0])
    _step(optimizer)
    return first.tolist(), second.tolist()


def a_scaler_found_an_inf_on_one_rank(rank: int) -> Any:
    weight, optimizer = _weight(rank, [8.0], [8.0], clip_norm=100.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(rank))
    _step(optimizer)
    skipped = weight.tolist(), optimizer.step_was_skipped
    del optimizer.grad_scale, optimizer.found_inf
    weight.grad = torch.tensor([8.0])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    _step(optimizer)
    return skipped, weight.tolist(), optimizer.last_report.norm


def one_norm_for_all(rank: int) -> Any:
    weight, optimizer = _weight(rank, [3.0, 4.0], [3.0, 4.5], clip_norm=1.0)
    _step(optimizer)
    report = optimizer.last_report
    return report.norm, report.clip_factor, report.finite


def clamped_then_clipped(rank: int) -> Any:
    _, optimizer = _weight(rank, [3.0, 9.0], [1.0, 2.0], clip_value=4.0, clip_norm=1.0)
    _step(optimizer)
    return optimizer.last_report.clip_factor


def a_bad_loss_on_one_rank(rank: int) -> Any:
    _, optimizer = _weight(rank, [1.0], [1.0])
    if rank:
        optimizer.observe(torch.tensor([0.0, NAN, 2.0]))
    _step(optimizer)
    report = optimizer.last_report
    return optimizer.step_was_skipped, report.describe(), report.norm


def parameters_go_bad_on_one_rank(rank: int) -> Any:
    weight, optimizer = _weight(rank, [1.0, 1.0], [1.0, 1.0], check_params_every=2, on_nonfinite="raise")
    if rank:
        weight.data[1] = NAN
    first = _step(optimizer)[1]
    weight.grad = torch.ones(2)
    second = _step(optimizer)[1]
    rows = [(row.name, row.kind, row.rank, row.first_bad) for row in optimizer.last_report.parameters]
    return first, second, rows, optimizer.bad_parameter_steps


def a_closure_goes_bad_on_one_rank(rank: int) -> Any:
    weight = nn.Parameter(torch.tensor([2.0, -1.0]))
    optimizer = nanscan.wrap(torch.optim.LBFGS([weight], lr=0.1, max_iter=4), process_group=True)
    calls = []

    def closure(bad: int | None = None) -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = (weight**4).sum() * (NAN if rank and len(calls) == bad else 1.0)
        loss.backward()
        return loss

    optimizer.step(closure)
    good, calls[:] = weight.tolist(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step(lambda: closure(3))
    return good, weight.tolist(), len(calls), optimizer.step_was_skipped, optimizer.last_report.bad[0].rank


def a_rank_without_gradients(rank: int) -> Any:
    weight, optimizer = _weight(rank, [3.0, 4.0], None, clip_norm=1.0)
    said, error = _step(optimizer)
    good = optimizer.last_report.norm, optimizer.last_report.numel, said, error
    weight.grad = torch.tensor([1.0, NAN]) if rank == 0 else None
    _step(optimizer)
    return good, optimizer.step_was_skipped, optimizer.last_report.describe()


def sparse_gradient_is_bad_on_one_rank(rank: int) -> Any:
    table = nn.Embedding(10, 2, sparse=True)
    inner = torch.optim.SparseAdam(list(table.named_parameters()))
    optimizer = nanscan.wrap(inner, process_group=True)
    table(torch.tensor([7, 3])).sum().backward()
    if rank:
        table.weight.grad._values()[1, 1] = NAN
    _step(optimizer)
    return optimizer.last_report.bad[0].first_bad, optimizer.last_report.bad[0].rank


def a_rank_that_can_not_scan(rank: int) -> Any:
    weight, optimizer = _weight(rank, [1.0], [1.0])
    if rank:
        weight.grad.untyped_storage().resize_(0)
    return _step(optimizer)[1], weight.tolist()


def ranks_at_other_steps(rank: int) -> Any:
    weight, optimizer = _weight(rank, [1.0], [1.0])
    optimizer._steps += rank
    return _step(optimizer)[1], weight.tolist()


def groups_of_one_rank(rank: int) -> Any:
    groups = [dist.new_group([0]), dist.new_group([1])]
    weight, optimizer = _weight(rank, [1.0], [NAN], process_group=groups[rank])
    _step(optimizer)
    try:
        nanscan.wrap(torch.optim.SGD([weight], lr=1.0), process_group=groups[1 - rank])
    except ValueError as error:
        return weight.tolist(), [row.rank for row in optimizer.last_report.bad], str(error)


def copies_leave_the_group_out(rank: int) -> Any:
    weight, optimizer = _weight(rank, [1.0], [NAN])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        copied, pickled = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    alone = []
    for other in (copied, pickled):
        other.param_groups[0]["params"][0].grad = torch.tensor([NAN if rank else 1.0])
        _step(other)
        alone.append(other.step_was_skipped)
    back = nanscan.wrap(copied, process_group="default")
    copied.param_groups[0]["params"][0].grad = torch.tensor([NAN if rank else 1.0])
    _step(back)
    return [str(w.message) for w in caught], alone, back.step_was_skipped


def a_rank_that_does_not_call_step(rank: int) -> Any:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    weight, optimizer = _weight(rank, [1.0], [1.0], process_group=group)
    return (_step(optimizer)[1], weight.tolist()) if rank == 0 else None


def a_second_wrap_brings_and_ends_the_group(rank: int) -> Any:
    weight, optimizer = _weight(rank, [1.0], [NAN], process_group=None)
    nanscan.wrap(optimizer, process_group=dist.group.WORLD)
    _step(optimizer)
    together = optimizer.step_was_skipped
    nanscan.wrap(optimizer, process_group=False)
    weight.grad = torch.tensor([NAN if rank else 1.0])
    _step(optimizer)
    return together, optimizer.step_was_skipped


def a_real_gradient_scaler(rank: int) -> Any:
    weight, optimizer = _weight(rank, None, None, clip_norm=100.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = []
    for bad in (False, True, False):
        optimizer.zero_grad()
        loss = (weight * (NAN if bad and rank else 2.0)).sum()
        scaler.scale(loss).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaler.step(optimizer)
        scaler.update(4.0)
        seen.append((optimizer.step_was_skipped, optimizer.last_report.finite_norm))
    return seen, weight.tolist()


def _recovered(rank: int, spoil: Any) -> Any:
    """A guarded run in which `spoil(step, model, loss)` makes the loss of each step; what became of it on this rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = nanscan.wrap(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp, process_group=True)
    recovery = nanscan.Recovery(ddp, optimizer, snapshot_every=3)
    torch.manual_seed(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(9):
            loss = ddp(torch.randn(6, 3)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recovery.step(loss=spoil(step, model, loss))
    back = [(one.cause, one.step, one.to_step) for one in recovery.rollbacks]
    reasons = [one.reason for one in recovery.rollbacks]
    return back, reasons, model[0].weight.tolist(), recovery.step_index


def recovery_from_a_loss_on_one_rank(rank: int) -> Any:
    return _recovered(rank, lambda step, model, loss: loss * NAN if rank and step == 4 else loss)


def recovery_from_a_buffer_on_one_rank(rank: int) -> Any:
    def spoil(step: int, model: Any, loss: Tensor) -> Tensor:
        if rank and step == 5:  # the snapshot of this step must not be taken on the other rank either
            model[1].running_mean.fill_(NAN)
        return loss

    return _recovered(rank, spoil)
