"""What a guard tells torch's own `GradScaler`, which makes the present step and gives no reference to itself."""

from __future__ import annotations

import sys

import torch

__all__ = ["note_nothing_to_check"]


def note_nothing_to_check() -> None:
    """Let the scaler that is making this step know that no gradient is there, which is no overflow.

    It has recorded no check then, and its `update()` would fail for that. It is found on the stack.
    """
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    if frame is None:
        return
    scaler, optimizer = frame.f_locals["self"], frame.f_locals["optimizer"]
    device = scaler._scale.device
    scaler._found_inf_per_device(optimizer).setdefault(device, torch.zeros((), device=device))
