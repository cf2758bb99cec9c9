"""The guard on torch.distributed with one card: NCCL, DDP and FSDP2 as a group of one. Several are not covered."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import nanscan
from benchmarks.gpu.result import Section


def ranks(device: str = "cuda", backend: str = "nccl") -> Section:
    """One healthy and one bad step of each layout; what is compared is float64 on the host."""
    section = Section()
    with _group(backend):
        for name, make in (("DDP", _ddp), ("DDP, process_group=True", _ddp), ("FSDP2", _fsdp)):
            model = make(device)
            group = True if name.endswith("True") else None
            inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=make is _ddp)
            section.check(f"{name}: norm, skip, name and index", *_steps(model, inner, group, device))
    section.say("one card, a group of one rank: runs on several cards are untested")
    return section


def _steps(model: nn.Module, inner: torch.optim.Optimizer, group: bool | None, device: str) -> tuple[bool, str]:
    optimizer = nanscan.wrap(inner, model, clip_norm=1e-3, process_group=group)
    inputs = torch.randn(16, 33, device=device)
    model(inputs).square().mean().backward()
    wanted = torch.cat([_whole(p.grad).double().flatten().cpu() for p in model.parameters()]).norm().item()
    optimizer.step()
    report = optimizer.last_report
    assert report is not None
    if abs(report.norm - wanted) > 1e-5 * wanted:
        return False, f"norm {report.norm}, float64 {wanted}"
    before = [_whole(p).clone() for p in model.parameters()]
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    _local(next(model.parameters()).grad)[3, 5] = float("nan")
    optimizer.step()
    same = all(torch.equal(old, _whole(p)) for old, p in zip(before, model.parameters(), strict=True))
    bad = optimizer.last_report.bad[0] if optimizer.last_report and optimizer.last_report.bad else None
    if not (optimizer.step_was_skipped and same and bad is not None and bad.first_bad == (3, 5)):
        return False, f"skipped {optimizer.step_was_skipped}, weights kept {same}, {bad}"
    return True, ""


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 7, bias=False), nn.Tanh(), nn.Linear(7, 3)).to(device)


def _ddp(device: str) -> nn.Module:
    return nn.parallel.DistributedDataParallel(_model(device))


def _fsdp(device: str) -> nn.Module:
    model = _model(device)
    fully_shard(model, mesh=init_device_mesh(device, (1,)))
    return model


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@contextmanager
def _group(backend: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
