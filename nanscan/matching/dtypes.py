"""The dtype of restored optimizer state: it follows its parameter's, but one that was chosen apart from that stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["followed"]


def followed(state: Any, param: Tensor, former: torch.dtype | None) -> Any:
    """`state` with the moments that had their parameter's dtype in the one that it has now, as torch casts them.

    Moments that had another dtype than their parameter, such as float32 ones of a bfloat16 weight, keep it, where torch
    would round them. So do `step` and other 0-dim numbers, as optimizers make them.

    Args:
        state: of one parameter, a dict that may hold lists; it is changed only where it is a dict.
        param: it.
        former: its dtype when the state was saved; None: unknown, and only what is wider than `param` is taken for
            chosen.

    >>> moment = torch.ones(2, dtype=torch.bfloat16)
    >>> followed({"exp_avg": moment}, torch.ones(2), torch.bfloat16)["exp_avg"].dtype
    torch.float32
    """
    if former == param.dtype or not param.is_floating_point() or not isinstance(state, dict):
        return state
    return {key: value if key == "step" else _cast(value, param, former) for key, value in state.items()}


def _cast(value: Any, param: Tensor, former: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(param.dtype) if _follows(value, param, former) else value
    if type(value) in (list, tuple):
        return type(value)(_cast(item, param, former) for item in value)
    return {key: _cast(item, param, former) for key, item in value.items()} if type(value) is dict else value


def _follows(value: Tensor, param: Tensor, former: torch.dtype | None) -> bool:
    if not value.is_floating_point() or (value.ndim == 0 and param.ndim > 0):
        return False
    if former is not None:
        return value.dtype == former
    return torch.promote_types(value.dtype, param.dtype) != value.dtype
