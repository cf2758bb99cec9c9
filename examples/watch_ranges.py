"""A learning rate ten times too high, seen coming: the layer that leaves its range first is named before any NaN.

Trained three times: at a good learning rate, where nothing is to be said, then at ten times as much in float32 and in
float16, up to the first loss that is not finite.

Run: python examples/watch_ranges.py   (needs scikit-learn for its handwritten digits)
"""

import math

import torch
from torch import nn

import nanscan
from nanscan.demo.data import Digits, batches, load_digits
from nanscan.demo.model import DigitNet


def train(digits: Digits, lr: float, dtype: torch.dtype) -> tuple[int, bool, nanscan.Watch]:
    """The number of steps that went well, whether all did, and what was watched."""
    torch.manual_seed(0)
    model = DigitNet().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    step = 0
    with nanscan.watch(model) as ranges:
        for images, labels in batches(digits, 2, 64, seed=0):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(dtype)).float(), labels)
            if not math.isfinite(loss.item()):
                return step, False, ranges
            loss.backward()
            optimizer.step()
            step += 1
    return step, True, ranges


def main() -> None:
    torch.set_num_threads(1)
    digits = load_digits()
    for lr, dtype in ((0.2, torch.float32), (2.0, torch.float32), (2.0, torch.float16)):
        steps, healthy, ranges = train(digits, lr, dtype)
        ending = "all well" if healthy else f"the loss is not finite at step {steps}"
        print(f"learning rate {lr}, {dtype}: {ending}")
        print("    " + ranges.describe().replace("\n", "\n    "))


if __name__ == "__main__":
    main()
