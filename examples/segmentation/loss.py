"""A loss for rare classes with two faults that people meet, and the same one mended."""

import torch.nn.functional as F
from torch import Tensor


def class_sums(logits: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each class, over the batch: overlap of prediction and mask, sum of both, and the share of the pixels."""
    probabilities = logits.softmax(1)
    members = F.one_hot(masks, logits.shape[1]).permute(0, 3, 1, 2).to(logits.dtype)
    overlap = (probabilities * members).sum((0, 2, 3))
    total = (probabilities + members).sum((0, 2, 3))
    return overlap, total, members.mean((0, 2, 3))


def log_dice_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Minus the logarithm of each class's Dice score, a small class counting more.

    1. Nothing of a class in the batch: its Dice score is 0, and log(0) is -inf.
    2. A few pixels of a class in the batch: its weight is their number below all pixels, some 10,000.

    Args:
        logits: `(n, classes, h, w)` float32.
        masks: `(n, h, w)` int64.

    Returns:
        The loss, 0-dim.
    """
    overlap, total, area = class_sums(logits, masks)
    dice = 2 * overlap / total
    return -(dice.log() / area).sum()


def mended_log_dice_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """The same with both ends limited: a Dice score above 0 for every class, and a weight of 100 at most."""
    overlap, total, area = class_sums(logits, masks)
    dice = (2 * overlap + 1) / (total + 1)
    return -(dice.log() / area.clamp(min=0.01)).sum()
