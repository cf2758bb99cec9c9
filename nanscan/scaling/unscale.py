"""Checking and unscaling the gradients of an optimizer that has no guard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nanscan import engine
from nanscan.engine.result import BadInput, EngineScan
from nanscan.names import Names

__all__ = ["Finding", "check", "is_served", "refuse_float16"]


class Finding(NamedTuple):
    """What a check found: a found_inf flag, None without gradients; and the host's scan where there is one."""

    flag: Tensor | None
    scan: EngineScan | None


def _with_gradient(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield param, param.grad


def is_served(optimizer: torch.optim.Optimizer, *, cuda: bool) -> bool:
    """True if the gradients are plain tensors, on the CPU or, with `cuda`, on CUDA devices: those the engine checks.

    To unscale on a device, torch's kernel is the better one: it checks what it has in its registers anyway.
    """
    kinds = ("cpu", "cuda") if cuda else ("cpu",)
    return all(type(grad) is Tensor and grad.device.type in kinds for _, grad in _with_gradient(optimizer))


def check(optimizer: torch.optim.Optimizer, device: torch.device) -> Finding:
    """Is there a NaN or Inf in a gradient? It only reads, and waits for no CUDA device.

    Args:
        optimizer: its gradients may be on several devices.
        device: of the loss scale; there the flag is wanted, one for all: two of 1.0 would be added to 2.0, which a
            fused optimizer doesn't take for a flag.
    """
    where = {grad.device for _, grad in _with_gradient(optimizer)}
    if not where:
        return Finding(None, None)
    if any(each.type == "cuda" for each in where):
        return Finding(_flag_of_devices(optimizer, where, device), None)
    try:
        scan = engine.scan_grads(optimizer.param_groups)
    except BadInput as error:
        name = Names(None).refresh(0, optimizer.param_groups)[error.position].names[0]
        raise error.kind(f"grad of '{name}' {error.reason}") from None
    return Finding(torch.full((), 1.0 - scan.finite, dtype=torch.float32, device=device), scan)


def _flag_of_devices(optimizer: torch.optim.Optimizer, where: set[torch.device], device: torch.device) -> Tensor:
    flags = []
    for each in where:
        groups = [{"params": [p for p, grad in _with_gradient(optimizer) if grad.device == each]}]
        flags.append(engine.launch_grads(groups, clip_norm=None).found_inf.to(device, non_blocking=True))
    return torch.stack(flags).amax()


def refuse_float16(optimizer: torch.optim.Optimizer) -> None:
    """Float16 gradients lose what is small when they are unscaled in place.

    Raises:
        ValueError: if there are some.
    """
    if any(grad.dtype == torch.float16 for _, grad in _with_gradient(optimizer)):
        raise ValueError(
            "Attempting to unscale FP16 gradients. Keep the parameters in float32 and run the forward pass under "
            "torch.autocast(dtype=torch.float16): unscaled in place, small float16 gradients become 0"
        )
