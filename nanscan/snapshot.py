"""What an optimizer holds: read to be copied, written back; and a copy for steps that may have to be undone."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from nanscan.state_copy import copy_state, has_plain_memory, memory_id
from nanscan.state_plan import SCALARS

__all__ = ["Snapshot", "evaluates_once", "nested_optimizers", "optimizer_content", "params_of", "put_back"]

_SINGLE = frozenset(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.LBFGS
)
_SCALARS = tuple(SCALARS)
_REFILLED = (dict, list, set, deque)
_CONTAINERS = (*_REFILLED, tuple, frozenset)
_OF_THE_LOOP = frozenset({"_opt_called", "found_inf", "grad_scale"})  # they are said by schedulers and scalers
_KEPT_ELSEWHERE = _OF_THE_LOOP | {"state", "param_groups", "defaults"}


def evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    """True if `optimizer.step(closure)` calls the closure once, before it touches anything: torch's, but for LBFGS."""
    return type(optimizer) in _SINGLE


class Snapshot:
    """The weights, state, group options and plain attributes of an optimizer, and of optimizers that it holds.

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
    """`optimizer` and every optimizer it holds: the base optimizer of SAM, a list of one optimizer for each layer."""
    found: list[torch.optim.Optimizer] = []
    todo = [optimizer]
    while todo:
        part = todo.pop()
        if all(part is not other for other in found):
            found.append(part)
            todo += [other for value in vars(part).values() for other in _optimizers_in(value)]
    return found


def _optimizers_in(value: Any) -> list[torch.optim.Optimizer]:
    if isinstance(value, torch.optim.Optimizer):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [item for item in items if isinstance(item, torch.optim.Optimizer)]


def optimizer_content(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The live state, group options and plain attributes of each of `nested_optimizers`; to be copied, not kept."""
    return [
        {
            "state": dict(part.state),
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in part.param_groups],
            "attributes": _attributes(part),
            "names": tuple(vars(part)),
        }
        for part in nested_optimizers(optimizer)
    ]


def _attributes(part: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps beside its state: numbers, tensors, containers of these such as a dict of counters."""
    own = {k: v for k, v in vars(part).items() if k not in _KEPT_ELSEWHERE and not k.endswith("_hooks")}
    if all(isinstance(value, _SCALARS) or callable(value) for value in own.values()):
        return {name: value for name, value in own.items() if isinstance(value, _SCALARS)}
    weights = {memory_id(p) for p in params_of(part) if has_plain_memory(p)}
    return {name: value for name, value in own.items() if _is_data(value, weights)}


def _is_data(value: Any, weights: set[int], depth: int = 20) -> bool:
    """True for what is nothing but numbers, text and tensors; a list of the parameters is no data of the optimizer."""
    if isinstance(value, _SCALARS):
        return True
    if isinstance(value, Tensor):
        return not (has_plain_memory(value) and memory_id(value) in weights)
    if not depth or not isinstance(value, _CONTAINERS):
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(_is_data(item, weights, depth - 1) for item in items)


def put_back(optimizer: torch.optim.Optimizer, content: list[dict[str, Any]]) -> None:
    """Give the optimizer a copied content, whose tensors are its own from now on. Groups added since are left alone."""
    for part, saved in zip(nested_optimizers(optimizer), content, strict=False):
        part.state.clear()
        part.state.update(saved["state"])
        for group, options in zip(part.param_groups, saved["groups"], strict=False):
            for key in group.keys() - options.keys() - {"params"}:
                del group[key]
            group.update(options)
        _put_attributes_back(part, saved["attributes"], saved["names"])


def _put_attributes_back(part: torch.optim.Optimizer, saved: dict[str, Any], names: tuple[str, ...]) -> None:
    own = vars(part)
    for name in _attributes(part).keys() - set(names):  # such as a flag which says that something was made ready
        del own[name]
    for name, value in saved.items():
        present: Any = own.get(name)
        if type(present) is type(value) and isinstance(value, _REFILLED):  # somebody else may hold it, too
            present.clear()
            (present.update if isinstance(value, (dict, set)) else present.extend)(value)
        else:
            own[name] = value
