"""What an optimizer holds: read to be copied, written back; and a copy for steps that may have to be undone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanscan.state_copy import copy_state

__all__ = ["Snapshot", "evaluates_once", "nested_optimizers", "optimizer_content", "params_of", "put_back"]

_SINGLE = frozenset(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.LBFGS
)
_SCALARS = (bool, int, float, Tensor)
_OF_THE_LOOP = frozenset({"_opt_called"})  # says that step() was called at all; schedulers warn where it was not


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
        self._optimizer = optimizer
        self._params = params_of(optimizer)
        self._saved, self._content = copy_state([self._params, optimizer_content(optimizer)])

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, bit for bit."""
        for param, saved in zip(self._params, self._saved, strict=True):
            param.copy_(saved)
        put_back(self._optimizer, self._content)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of an optimizer and of those that it holds, each once."""
    groups = (group for part in nested_optimizers(optimizer) for group in part.param_groups)
    return list({id(p): p for group in groups for p in group["params"]}.values())


def nested_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """`optimizer` and every optimizer it holds as an attribute, such as the base optimizer of SAM."""
    found: list[torch.optim.Optimizer] = []
    todo = [optimizer]
    while todo:
        part = todo.pop()
        if all(part is not other for other in found):
            found.append(part)
            todo += [value for value in vars(part).values() if isinstance(value, torch.optim.Optimizer)]
    return found


def optimizer_content(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The live state, group options and scalar attributes of each of `nested_optimizers`; to be copied, not kept."""
    return [
        {
            "state": dict(part.state),
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in part.param_groups],
            "scalars": {k: v for k, v in vars(part).items() if isinstance(v, _SCALARS) and k not in _OF_THE_LOOP},
        }
        for part in nested_optimizers(optimizer)
    ]


def put_back(optimizer: torch.optim.Optimizer, content: list[dict[str, Any]]) -> None:
    """Give the optimizer a copied content, whose tensors are its own from now on. Groups added since are left alone."""
    for part, saved in zip(nested_optimizers(optimizer), content, strict=False):
        part.state.clear()
        part.state.update(saved["state"])
        for group, options in zip(part.param_groups, saved["groups"], strict=False):
            for key in group.keys() - options.keys() - {"params"}:
                del group[key]
            group.update(options)
        vars(part).update(saved["scalars"])
