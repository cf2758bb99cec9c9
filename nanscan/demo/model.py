"""The network that is trained, and the loss with the fault in it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanscan.demo.data import CLASSES

__all__ = ["DigitNet", "balanced_loss"]


class Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut; input and output `(n, channels, h, w)` float32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x).relu()
        out: Tensor = self.second(hidden)
        return (x + out).relu()


class DigitNet(nn.Module):
    """A small residual network: `(n, 1, 8, 8)` float32 -> logits `(n, 10)`; 20 parameters, about 80,000 weights."""

    def __init__(self, channels: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels * 4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.max_pool2d(self.stem(images).relu(), 2)
        logits: Tensor = self.head(F.max_pool2d(self.blocks(hidden), 2).flatten(1))
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
    >>> balanced_loss(logits, torch.arange(10)).item()      # every class is there: log(10)
    2.3025851249694824
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
