"""Checking and unscaling the gradients of an optimizer that has no guard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nanscan import engine
from nanscan.engine.result import BadInput

__all__ = ["check", "check_and_unscale", "is_served"]


def _with_gradient(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield param, param.grad


def is_served(optimizer: torch.optim.Optimizer, *, cuda: bool) -> bool:
    """True if the gradients are plain tensors that the engine checks; False for shards and, unless `cuda`, for CUDA.

    To unscale on a CUDA device, torch's kernel is the better one: it checks what it has in its registers anyway.
    """
    return all(type(grad) is Tensor and (cuda or not grad.is_cuda) for _, grad in _with_gradient(optimizer))


def check(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[torch.device, Tensor]:
    """found_inf by device, 1.0 where a gradient holds a NaN or Inf; {} without gradients. It only reads.

    Args:
        device: of the loss scale: there the flag goes that the host has found.
    """
    on_device: dict[torch.device, list[Tensor]] = {}
    for param, grad in _with_gradient(optimizer):
        on_device.setdefault(grad.device, []).append(param)
    on_host = [p for where in [*on_device] if where.type != "cuda" for p in on_device.pop(where)]
    flags = {
        where: engine.launch_grads([{"params": params}], clip_norm=None).found_inf
        for where, params in on_device.items()
    }
    if on_host:
        found = torch.full((), 1.0 - _scan(on_host).finite, dtype=torch.float32, device=device)
        flags[device] = torch.maximum(flags[device], found) if device in flags else found
    return flags


def check_and_unscale(
    optimizer: torch.optim.Optimizer, inv_scale: Tensor, device: torch.device, allow_fp16: bool
) -> dict[torch.device, Tensor]:
    """`check`, then multiply the gradients, which are not on CUDA devices, by `inv_scale`.

    Raises:
        ValueError: if there are float16 gradients, which lose what is small when they are unscaled in place.
    """
    if not allow_fp16 and any(grad.dtype == torch.float16 for _, grad in _with_gradient(optimizer)):
        raise ValueError(
            "Attempting to unscale FP16 gradients. Keep the parameters in float32 and run the forward pass under "
            "torch.autocast(dtype=torch.float16): unscaled in place, small float16 gradients become 0"
        )
    flags = check(optimizer, device)
    if flags:
        engine.scale_grads_(optimizer.param_groups, float(inv_scale))
    return flags


def _scan(params: list[Tensor]) -> Any:
    try:
        return engine.scan_grads([{"params": params}])
    except BadInput as error:
        raise error.kind(f"grad of parameter {error.position} {error.reason}") from None
