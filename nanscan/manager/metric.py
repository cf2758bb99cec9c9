"""The metric that says which checkpoints are the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Metric"]


class Metric:
    """A number in `extra` and the direction in which it gets better.

    Args:
        name: its key in `extra`.
        mode: `"max"` or `"min"`.
    """

    def __init__(self, name: str, mode: str) -> None:
        self.name = name
        self.mode = mode

    @classmethod
    def of(cls, best: Any) -> Metric | None:
        """From the argument `best` of the manager.

        Raises:
            TypeError: it is neither None nor a pair of strings.
            ValueError: the direction is neither "max" nor "min".
        """
        if best is None:
            return None
        if not isinstance(best, (tuple, list)) or len(best) != 2 or not all(isinstance(item, str) for item in best):
            raise TypeError(f'best must be a pair such as ("accuracy", "max"), got {best!r}')
        name, mode = best
        if mode not in ("max", "min"):
            raise ValueError(f'best=({name!r}, {mode!r}): the second must be "max" or "min"')
        return cls(name, mode)

    def required(self, extra: Mapping[str, Any]) -> float:
        """The metric of a checkpoint that is to be saved.

        Raises:
            ValueError: it isn't there.
            TypeError: it is no number.
        """
        if self.name not in extra:
            has = ", ".join(map(repr, extra)) or "nothing"
            raise ValueError(
                f"best=({self.name!r}, {self.mode!r}), but extra has no {self.name!r} (it has {has}): "
                f"give save(..., extra={{{self.name!r}: value}})"
            )
        number = as_number(extra[self.name])
        if number is None:
            raise TypeError(f"extra[{self.name!r}] must be a number, got {type(extra[self.name]).__name__}")
        return number

    def rank(self, value: float | None) -> float | None:
        """`value` so that more is better; None for a value that is never the best: none, NaN, infinite."""
        if value is None or not math.isfinite(value):
            return None
        return value if self.mode == "max" else -value


def as_number(value: Any) -> float | None:
    """`value` as a float, None if it is no number.

    >>> as_number(torch.tensor(0.5)), as_number("0.5")
    (0.5, None)
    """
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return None
    return float(value)
