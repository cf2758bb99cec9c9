"""Losses that join a scan: as tensors, and what they are called."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from nanscan.names import label_of
from nanscan.report import Label

__all__ = ["as_loss", "loss_labels", "mean_loss", "told_losses"]


def as_loss(loss: Any) -> Tensor:
    """A loss as a detached floating-point tensor.

    Raises:
        TypeError: it is neither a tensor nor a number.
    """
    if isinstance(loss, Tensor):
        plain: Tensor = loss.detach()
        return plain if plain.is_floating_point() or plain.is_complex() else plain.float()
    if isinstance(loss, Real):  # NumPy's, too
        return torch.tensor(float(loss), dtype=torch.float64, device="cpu")
    raise TypeError(f"loss must be a tensor or a number, got {type(loss).__name__}")


def loss_labels(losses: Sequence[Tensor]) -> list[Label]:
    """`"loss"`, or `"loss[0]"`, `"loss[1]"`, … where there are several."""
    if len(losses) == 1:
        return [label_of(losses[0], ("loss",), "loss")]
    return [label_of(loss, (f"loss[{i}]",), "loss") for i, loss in enumerate(losses)]


def mean_loss(losses: Sequence[Tensor]) -> float | None:
    """The mean of the losses observed for a step, each being the mean of its elements; None if there are none.

    >>> mean_loss([torch.tensor([1.0, 3.0]), torch.tensor(-4.0)])
    -1.0
    """
    means = [float(_real(loss).mean() if loss.ndim else _real(loss)) for loss in losses if loss.numel()]
    return sum(means) / len(means) if means else None


def told_losses(losses: Sequence[Tensor]) -> list[Tensor]:
    """The losses on their way to the host, without waiting; none while a CUDA graph is captured."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return []
    return [_real(loss).mean().to("cpu", non_blocking=True) for loss in losses if loss.numel()]


def _real(loss: Tensor) -> Tensor:
    return (loss.real if loss.is_complex() else loss).double()
