"""Scale a learning rate everywhere it is kept, so that no scheduler brings the old one back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["learning_rates", "scale_learning_rates"]

_IN_GROUPS = ("initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr")
_IN_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr", "base_values", "swa_lrs")


def learning_rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """The learning rate of each group, where it has one.

    >>> learning_rates(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5))
    (0.5,)
    """
    return tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)


@torch.no_grad()
def scale_learning_rates(optimizers: Iterable[torch.optim.Optimizer], schedulers: Iterable[Any], factor: float) -> None:
    """Multiply by `factor` every learning rate of the groups, and those that schedulers compute new ones from.

    Schedulers compute the next rate from the present one (StepLR, ReduceLROnPlateau), from `base_lrs` (LambdaLR,
    CosineAnnealingWarmRestarts), or from what they left in the groups (OneCycleLR: `initial_lr`, `max_lr`, `min_lr`);
    lower limits such as `eta_min` are scaled too, so that the whole schedule is the old one times `factor`.

    Args:
        optimizers: whose groups; a group that occurs twice is scaled once, a learning rate that is a tensor in place.
        schedulers: any number of them; those inside of SequentialLR and ChainedScheduler are found.
        factor: > 0.
    """
    done: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if id(group) not in done:
                done.add(id(group))
                _scale_group(group, factor, done)
    for scheduler in _all(schedulers):
        for name in _IN_SCHEDULERS:
            if name in vars(scheduler):
                setattr(scheduler, name, _scaled(getattr(scheduler, name), factor))


def _scale_group(group: dict[str, Any], factor: float, done: set[int]) -> None:
    lr = group.get("lr")
    if isinstance(lr, Tensor):  # a captured graph, and maybe another group, holds this very tensor
        if id(lr) not in done:
            done.add(id(lr))
            lr.mul_(factor)
    elif lr is not None:
        group["lr"] = lr * factor
    for name in _IN_GROUPS:
        if name in group:
            group[name] = _scaled(group[name], factor)


def _scaled(value: Any, factor: float) -> Any:
    """A number, tensor or list of them times `factor`; never in place: these are not shared with anybody's `lr`."""
    if isinstance(value, (list, tuple)):
        return type(value)(_scaled(item, factor) for item in value)
    return value * factor if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool) else value


def _all(schedulers: Iterable[Any]) -> list[Any]:
    """The schedulers and those that they hold, each once."""
    found: list[Any] = []
    todo = list(schedulers)
    while todo:
        scheduler = todo.pop(0)
        if hasattr(scheduler, "__dict__") and all(scheduler is not other for other in found):
            found.append(scheduler)
            inner = vars(scheduler).get("_schedulers") or vars(scheduler).get("schedulers") or ()
            todo += inner if isinstance(inner, (list, tuple)) else ()
            for name in ("after_scheduler", "scheduler"):  # warm-up wrappers that are not torch's
                todo += [vars(scheduler)[name]] if vars(scheduler).get(name) is not None else []
    return found
