"""What callers hand to `Recovery`: checked, with errors that say what was given and what is wanted."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from nanscan.guard import GuardedOptimizer
from nanscan.manager import CheckpointManager
from nanscan.snapshot import nested_optimizers, params_of

__all__ = ["Options", "check_model", "checked_options", "checked_parts", "guard_of"]


class Options(NamedTuple):
    """The numbers among the arguments; see `Recovery`."""

    snapshot_every: int
    patience: int
    lr_backoff: float
    max_rollbacks: int


def checked_options(snapshot_every: int, patience: int, lr_backoff: float, max_rollbacks: int) -> Options:
    """The numbers, or a ValueError or TypeError that names the wrong one."""
    counts = (("snapshot_every", snapshot_every, 1), ("patience", patience, 1), ("max_rollbacks", max_rollbacks, 0))
    for name, value, least in counts:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not 0.0 < float(lr_backoff) <= 1.0:
        raise ValueError(f"lr_backoff must be greater than 0 and at most 1 (the rate stays as it is), got {lr_backoff}")
    return Options(snapshot_every, patience, float(lr_backoff), max_rollbacks)


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what is no model or optimizer, and parameters that have no values to go back to."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or of nanscan.wrap, got {type(optimizer).__name__}")
    named = [*model.named_parameters(), *model.named_buffers()]
    named += [(f"optimizer's parameter {number}", p) for number, p in enumerate(params_of(optimizer))]
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"'{name}' is not initialized yet (a lazy module): run the model once before Recovery")
        if tensor.is_meta:
            raise ValueError(
                f"'{name}' is on the meta device and has no values to go back to: give it memory first "
                "(model.to_empty(device=...), then initialize or load it)"
            )


def guard_of(optimizer: torch.optim.Optimizer) -> GuardedOptimizer | None:
    """The guarded optimizer, also inside of another wrapper; None if there is none."""
    return next((part for part in nested_optimizers(optimizer) if isinstance(part, GuardedOptimizer)), None)


def checked_parts(scheduler: Any, scaler: Any, manager: Any) -> list[Any]:
    """The schedulers as a list; refuses what is no scheduler, scaler or manager."""
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    if manager is not None and not isinstance(manager, CheckpointManager):
        raise TypeError(f"manager must be a nanscan.CheckpointManager, got {type(manager).__name__}")
    several = list(scheduler) if isinstance(scheduler, (list, tuple)) else [] if scheduler is None else [scheduler]
    for item in several:
        if not hasattr(item, "state_dict") or not hasattr(item, "load_state_dict"):
            raise TypeError(f"scheduler must have state_dict() and load_state_dict(), {type(item).__name__} has not")
    if len(several) > 1 and manager is not None:
        raise ValueError(
            f"a manager stores one scheduler, got {len(several)}: combine them by "
            "torch.optim.lr_scheduler.ChainedScheduler or SequentialLR"
        )
    return several
