"""The network that is trained, and the loss with the fault in it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanscan.demo.data import CLASSES

__all__ = ["DigitNet", "balanced_loss"]


class Residual(nn.Module):
    """Two linear layers around a shortcut; input and output `(n, width)` float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return (x + out).relu()


class DigitNet(nn.Module):
    """A small residual network: `(n, 64)` float32 -> logits `(n, 10)`; 20 parameters, 81,706 weights.

    >>> sum(parameter.numel() for parameter in DigitNet().parameters())
    81706
    """

    def __init__(self, width: int = 96, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(images).relu()))
        return logits


def balanced_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy averaged within each class, then over the classes, so that rare classes count as much.

    It is written as people write it, and it has the fault that people meet: a class without a sample in the batch
    is 0/0. The loss is NaN then, and so is the gradient of every weight.

    Args:
        logits: `(n, 10)` float32.
        labels: `(n,)` int64 in 0..9.

    Returns:
        The loss, 0-dim float32.

    >>> logits = torch.zeros(10, 10)
    >>> round(balanced_loss(logits, torch.arange(10)).item(), 4)      # every class is there: log(10)
    2.3026
    >>> balanced_loss(logits, torch.zeros(10, dtype=torch.int64)).item()
    nan
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    members = F.one_hot(labels, CLASSES).to(losses.dtype)
    return ((losses @ members) / members.sum(0)).mean()


def absent_classes(labels: Tensor) -> list[int]:
    """The classes of 0..9 that no label belongs to.

    >>> absent_classes(torch.tensor([0, 1, 2, 3, 4, 5, 6, 8]))
    [7, 9]
    """
    return torch.bincount(labels, minlength=CLASSES).eq(0).nonzero().flatten().tolist()
