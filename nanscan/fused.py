"""torch's fused optimizers: they divide by `grad_scale` and obey `found_inf` inside their one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from nanscan.engine.shards import is_dtensor

__all__ = ["has_step_hooks", "one_device", "ready_to_skip", "step_with", "takes_scale"]

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def takes_scale(optimizer: torch.optim.Optimizer) -> bool:
    """True if `optimizer.step()` reads `grad_scale` and `found_inf`: fused in every group, and torch's own class.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> takes_scale(torch.optim.SGD([weight], fused=True)), takes_scale(torch.optim.SGD([weight]))
    (True, False)
    """
    return type(optimizer) in _FUSED and all(group.get("fused") for group in optimizer.param_groups)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if somebody wants to be called around each real step."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def one_device(groups: list[dict[str, Any]]) -> torch.device | None:
    """The device that all parameters are on; None if there are several, or no parameters, or if they are sharded."""
    if any(is_dtensor(p) for group in groups for p in group["params"]):
        return None
    devices = {p.device for group in groups for p in group["params"]}
    return devices.pop() if len(devices) == 1 else None


def ready_to_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Make sure that the kernel may skip this step; False if it can't.

    Fused SGD with momentum takes a missing buffer for a first step and allocates it uninitialised; were that step
    skipped, the next would go on from garbage. A buffer of zeros gives the same first step, as long as there is no
    dampening (which torch leaves out of the first step only).
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        for param in group["params"]:
            if param.grad is None or optimizer.state[param].get("momentum_buffer") is not None:
                continue
            if group["dampening"] != 0:
                return False
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    return True


def step_with(
    optimizer: torch.optim.Optimizer, kwargs: Mapping[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None
) -> Any:
    """`optimizer.step(**kwargs)` while it holds the two attributes."""
    own = vars(optimizer)
    own["grad_scale"], own["found_inf"] = grad_scale, found_inf
    try:
        return optimizer.step(**kwargs)
    finally:
        own.pop("grad_scale", None)
        own.pop("found_inf", None)
