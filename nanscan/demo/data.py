"""The handwritten digits that scikit-learn ships, and the order in which batches are drawn from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CLASSES", "Digits", "MissingExtra", "batches", "load_digits"]

CLASSES = 10
TRAINING_SHARE = 0.8


class MissingExtra(ImportError):
    """A package that only the demo needs is not installed; the message holds the command that installs it."""


@dataclass(frozen=True)
class Digits:
    """Images of 8x8 pixels, `(n, 64)` float32 in 0..1, and labels `(n,)` int64 in 0..9, for training and testing."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(seed: int = 0) -> Digits:
    """Load the 1,797 digits and split them 80 : 20.

    Args:
        seed: chooses the split.

    Returns:
        The split data, on the CPU.

    Raises:
        MissingExtra: scikit-learn is not installed.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.

    >>> digits = load_digits()
    >>> tuple(digits.train_images.shape), tuple(digits.test_images.shape)
    ((1437, 64), (360, 64))
    """
    try:
        from sklearn.datasets import load_digits as sklearn_digits
    except ImportError as error:
        raise MissingExtra("the demo needs scikit-learn: pip install 'nanscan[demo]'") from error
    pixels, labels = sklearn_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32) / 16
    targets = torch.as_tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    train, test = order[: int(TRAINING_SHARE * len(order))], order[int(TRAINING_SHARE * len(order)) :]
    return Digits(images[train], targets[train], images[test], targets[test])


def batches(digits: Digits, epochs: int, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Every training sample once per epoch, shuffled; the last batch of an epoch is the smaller rest, as it usually is.

    The same seed gives the same batches in the same order.
    """
    generator = torch.Generator().manual_seed(seed)
    count = len(digits.train_labels)
    for _ in range(epochs):
        for chosen in torch.split(torch.randperm(count, generator=generator), batch_size):
            yield digits.train_images[chosen], digits.train_labels[chosen]


def batch_count(digits: Digits, epochs: int, batch_size: int) -> int:
    """How many batches `batches` will give."""
    return epochs * -(-len(digits.train_labels) // batch_size)
