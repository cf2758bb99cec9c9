"""Losses that join a scan: as tensors, and what they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanscan.names import label_of
from nanscan.report import Label

__all__ = ["as_loss", "loss_labels"]


def as_loss(loss: Any) -> Tensor:
    """A loss as a detached floating-point tensor.

    Raises:
        TypeError: it is neither a tensor nor a number.
    """
    if isinstance(loss, Tensor):
        plain: Tensor = loss.detach()
        return plain if plain.is_floating_point() or plain.is_complex() else plain.float()
    if isinstance(loss, (int, float)):
        return torch.tensor(loss, dtype=torch.float64)
    raise TypeError(f"loss must be a tensor or a number, got {type(loss).__name__}")


def loss_labels(losses: Sequence[Tensor]) -> list[Label]:
    """`"loss"`, or `"loss[0]"`, `"loss[1]"`, … where there are several."""
    if len(losses) == 1:
        return [label_of(losses[0], ("loss",), "loss")]
    return [label_of(loss, (f"loss[{i}]",), "loss") for i, loss in enumerate(losses)]
