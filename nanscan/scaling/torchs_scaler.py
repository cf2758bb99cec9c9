"""What a guard tells torch's own `GradScaler`, which makes the present step and gives no reference to itself."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

__all__ = ["handed_over"]


def handed_over(guard: Any) -> tuple[Tensor | None, Any]:
    """The loss scale and the flag that a scaler has given to a guarded optimizer for this step.

    Returns:
        The scale by which the gradients are still multiplied, None if they are not; and what was found, a tensor, 0
        where there was nothing to check, None without a scaler.
    """
    own = vars(guard)
    scale, found_inf = own.get("grad_scale"), own.get("found_inf")
    if found_inf is None or guard.scaled_step is not None:  # a nanscan.GradScaler knows all this
        return scale, found_inf
    scaler, optimizer = _on_the_stack()
    if scaler is None:
        return scale, found_inf
    if not isinstance(found_inf, Tensor):  # the sum of no flags: update() would fail for that, though it is no overflow
        device = scaler._scale.device
        scaler._found_inf_per_device(optimizer).setdefault(device, torch.zeros((), device=device))
    inside = id(guard.optimizer)
    if inside in scaler._per_optimizer_states:  # unscale_() was given the optimizer that is inside the guard
        stage = scaler._per_optimizer_states[inside]["stage"]
        scale = None if stage is OptState.UNSCALED else scale
    return scale, found_inf


def _on_the_stack() -> tuple[Any, Any]:
    """The scaler that is making this step, and what it steps; None and None if nobody is."""
    frame = sys._getframe(2).f_back
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    return (None, None) if frame is None else (frame.f_locals["self"], frame.f_locals["optimizer"])
