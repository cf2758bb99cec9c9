"""What all runs share: the scenes, the order of the batches, the loss, the settings; and the test of a model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from data import CLASSES, Scenes, batches
from loss import log_dice_loss, mended_log_dice_loss
from model import MendedUNet, UNet
from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """One training: the same seed gives the same weights at the start and the same batches."""

    scenes: Scenes
    seed: int = 0
    epochs: int = 15
    batch_size: int = 16
    learning_rate: float = 3e-3
    mended: bool = False
    """The loss and the model without their faults."""

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return mended_log_dice_loss if self.mended else log_dice_loss

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.scenes.train_masks) // self.batch_size)

    def make_model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return MendedUNet() if self.mended else UNet()

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(self.scenes, self.batch_size, seed=1000 * self.seed + epoch)


@torch.no_grad()
def class_ious(model: nn.Module, scenes: Scenes) -> list[float]:
    """Intersection over union of each class over all test pixels; their mean is the mIoU."""
    model.eval()
    predicted = model(scenes.test_images).argmax(1)
    model.train()
    ious = []
    for label in range(len(CLASSES)):
        found, true = predicted == label, scenes.test_masks == label
        ious.append(((found & true).sum() / (found | true).sum()).item())
    return ious
