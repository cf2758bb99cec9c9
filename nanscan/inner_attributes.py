"""What an optimizer holds beside groups, state and defaults, which is all that torch's own pickling takes along."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Any

import torch

__all__ = ["carried_attributes", "copied_attributes", "give_attributes", "own_attributes"]

_OF_THE_LOOP = frozenset({
    "_opt_called", "step", "found_inf", "grad_scale", "_zero_grad_profile_name", "_need_device_dtype_check_for_fused",
    "_step_supports_amp_scaling", "_warned_capturable_if_run_uncaptured",
})  # fmt: skip  # made anew by torch, by schedulers or by scalers


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that torch's `Optimizer.__getstate__` drops and nobody makes anew, apart from hooks.

    Empty where the class has a `__getstate__` of its own: it knows better.

    >>> sorted(own_attributes(torch.optim.LBFGS([torch.zeros(1)])))
    ['_numel_cache', '_params']
    """
    if type(optimizer).__getstate__ is not torch.optim.Optimizer.__getstate__:
        return {}
    kept = torch.optim.Optimizer.__getstate__(optimizer).keys() | _OF_THE_LOOP
    return {name: value for name, value in vars(optimizer).items() if name not in kept and not name.endswith("_hooks")}


def carried_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Those of `own_attributes` that can be pickled: with them a copy goes on as the original does."""
    return {name: value for name, value in own_attributes(optimizer).items() if _pickles(value)}


def copied_attributes(attributes: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """Deep copies of those that let themselves be copied: a loss with its graph, which can be pickled, does not."""
    copies = {}
    for name, value in attributes.items():
        with contextlib.suppress(Exception):  # whatever a __deepcopy__ raises
            copies[name] = copy.deepcopy(value, memo)
    return copies


def give_attributes(optimizer: torch.optim.Optimizer, attributes: dict[str, Any]) -> None:
    """Give a copy the attributes that it lacks."""
    for name, value in attributes.items():
        vars(optimizer).setdefault(name, value)


class _Trial(pickle.Pickler):
    """Pickles without writing tensors and optimizers, which are known to be picklable."""

    def persistent_id(self, obj: Any) -> Any:
        return "known" if isinstance(obj, (torch.Tensor, torch.optim.Optimizer)) else None


def _pickles(value: Any) -> bool:
    try:
        _Trial(io.BytesIO()).dump(value)
    except Exception:  # whatever a __reduce__ raises
        return False
    return True
