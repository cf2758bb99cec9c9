"""Reading numbers and histories out of a saved state, with an error that says what does not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["count_of", "history_of", "number_of"]


def history_of(state: Mapping[str, Any], name: str) -> list[float]:
    """The finite numbers of a 1-dim float tensor in `state`.

    Raises:
        ValueError: if there is no such tensor.
    """
    value = state.get(name)
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or not value.is_floating_point():
        raise ValueError(f"{name} must be a 1-dim float tensor, got {_shown(value)}")
    numbers: list[float] = value.double().tolist()
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{name} holds numbers that are not finite")
    return numbers


def number_of(state: Mapping[str, Any], name: str) -> float:
    """A finite number in `state`.

    Raises:
        ValueError: if there is none.
    """
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {_shown(value)}")
    return float(value)


def count_of(state: Mapping[str, Any], name: str) -> int:
    """A whole number in `state` that is not negative.

    Raises:
        ValueError: if there is none.
    """
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an int that is not negative, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    return "nothing" if value is None else repr(value)
