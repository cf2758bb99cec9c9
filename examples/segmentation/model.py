"""A small U-Net that can't be pickled, as such models are met, and the same one mended."""

import threading

import torch
import torch.nn.functional as F
from data import CLASSES
from torch import Tensor, nn

import nanscan


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """`(n, 3, h, w)` float32 -> logits `(n, 4, h, w)`; h and w are multiples of 4. 118,644 weights.

    A hook keeps what comes out of the lowest level, for a window that another thread draws; hence the lock.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1 = double_convolution(3, width)
        self.down2 = double_convolution(width, 2 * width)
        self.bottom = double_convolution(2 * width, 4 * width)
        self.up2 = double_convolution(6 * width, 2 * width)
        self.up1 = double_convolution(3 * width, width)
        self.head = nn.Conv2d(width, len(CLASSES), 1)
        self.lock = threading.Lock()
        self.features: dict[str, Tensor] = {}
        self.add_hook()
        self.to(memory_format=torch.channels_last)

    def add_hook(self) -> None:
        self.bottom.register_forward_hook(lambda module, inputs, output: self.keep(output))

    def keep(self, output: Tensor) -> None:
        with self.lock:
            self.features["bottom"] = output.detach()

    def forward(self, images: Tensor) -> Tensor:
        high = self.down1(images)
        middle = self.down2(F.max_pool2d(high, 2))
        low = self.bottom(F.max_pool2d(middle, 2))
        middle = self.up2(torch.cat([F.interpolate(low, scale_factor=2), middle], 1))
        high = self.up1(torch.cat([F.interpolate(middle, scale_factor=2), high], 1))
        return self.head(high)


class MendedUNet(nanscan.TransientState, UNet, transient={"lock": threading.Lock, "features": dict}):
    """The lock and the kept tensor stay out of the pickle, and the hook is a method, which pickle finds by name."""

    def add_hook(self) -> None:
        self.bottom.register_forward_hook(self.keep_output)

    def keep_output(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        self.keep(output)
