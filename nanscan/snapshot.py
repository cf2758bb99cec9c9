"""A copy of weights and optimizer state, for steps that change weights before they know whether they may."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

__all__ = ["Snapshot", "evaluates_once"]

_SINGLE = frozenset(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.LBFGS
)
_SCALARS = (bool, int, float, Tensor)


def evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    """True if `optimizer.step(closure)` calls the closure once, before it touches anything: torch's, but for LBFGS."""
    return type(optimizer) in _SINGLE


class Snapshot:
    """The weights, state, group options and scalar attributes of an optimizer, and of optimizers that it holds.

    Takes as much memory as these. `restore` may be called once.

    Args:
        optimizer: whose.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    >>> before = Snapshot(optimizer)
    >>> weight.grad = torch.ones(1); optimizer.step()
    >>> before.restore(); weight.item(), len(optimizer.state)
    (1.0, 0)
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._parts = _nested(optimizer)
        self._params = {
            id(p): (p, p.detach().clone())
            for part in self._parts
            for group in part.param_groups
            for p in group["params"]
        }
        self._states = [{key: _copy(value) for key, value in part.state.items()} for part in self._parts]
        self._groups = [[_options(group) for group in part.param_groups] for part in self._parts]
        self._scalars = [{k: _copy(v) for k, v in vars(p).items() if isinstance(v, _SCALARS)} for p in self._parts]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, bit for bit."""
        for param, saved in self._params.values():
            param.copy_(saved)
        for part, state, groups, scalars in zip(self._parts, self._states, self._groups, self._scalars, strict=True):
            part.state.clear()
            part.state.update(state)
            for group, options in zip(part.param_groups, groups, strict=True):
                for key in group.keys() - options.keys() - {"params"}:
                    del group[key]
                group.update(options)
            vars(part).update(scalars)


def _nested(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """`optimizer` and every optimizer it holds as an attribute, such as the base optimizer of SAM."""
    found: list[torch.optim.Optimizer] = []
    todo = [optimizer]
    while todo:
        part = todo.pop()
        if all(part is not other for other in found):
            found.append(part)
            todo += [value for value in vars(part).values() if isinstance(value, torch.optim.Optimizer)]
    return found


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) for key, value in group.items() if key != "params"}


def _copy(value: Any) -> Any:
    """A copy of tensors and of the containers around them; anything else is shared."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if type(value) in (list, tuple, deque):
        return type(value)(_copy(item) for item in value)
    return value
