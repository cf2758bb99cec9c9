"""Two real divergences, each trained three times: healthy, in plain PyTorch, and with `nanscan.Recovery`.

1. A learning rate ten times too high: the loss grows until it overflows.
2. Weights in float16: the activations leave float16's range, 65,504, a few steps earlier.

Run: python examples/recovery_divergence.py   (needs scikit-learn for its handwritten digits)
"""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import nn

import nanscan
from nanscan.demo.data import Digits, batches, load_digits
from nanscan.demo.model import DigitNet

EPOCHS = 12
MOMENTUM = 0.9


@dataclass
class Run:
    accuracy: float
    loss: float
    first_bad: int | None
    recovery: nanscan.Recovery | None


def train(digits: Digits, lr: float, dtype: torch.dtype = torch.float32, recover: bool = False) -> Run:
    torch.manual_seed(0)
    model = DigitNet().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    recovery = None
    if recover:
        optimizer = nanscan.wrap(optimizer, model)
        recovery = nanscan.Recovery(model, optimizer, lr_backoff=0.1, patience=2)  # line one

    first_bad, loss = None, torch.tensor(0.0)
    stream = batches(digits, EPOCHS, 64, seed=0)
    for step, (images, labels) in enumerate(stream if recovery is None else recovery.replay(stream)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(dtype)).float(), labels)
        loss.backward()
        optimizer.step()
        if recovery is not None and recovery.step():  # line two
            print(f"    {recovery.rollbacks[-1].describe()[:150]} ...")
            print(f"    learning rate now {optimizer.param_groups[0]['lr']:g}, bad batches {recovery.bad_batches}")
        if first_bad is None and not math.isfinite(loss.item()):
            first_bad = step
    with torch.no_grad():
        right = model(digits.test_images.to(dtype)).argmax(1) == digits.test_labels
    return Run(right.float().mean().item(), loss.item(), first_bad, recovery)


def compare(title: str, healthy: Run, digits: Digits, lr: float, dtype: torch.dtype) -> None:
    print(title)
    plain = train(digits, lr, dtype)
    recovered = train(digits, lr, dtype, recover=True)
    print(f"    healthy:   accuracy {healthy.accuracy:.1%}, loss {healthy.loss:.4f}")
    print(f"    plain:     accuracy {plain.accuracy:.1%}, loss {plain.loss:.4f}, since step {plain.first_bad}")
    print(f"    recovered: accuracy {recovered.accuracy:.1%}, loss {recovered.loss:.4f}")


def main() -> None:
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # everything is printed here instead
    torch.set_num_threads(1)
    digits = load_digits()
    healthy = train(digits, 0.2)
    compare("learning rate 2.0 instead of 0.2, float32", healthy, digits, 2.0, torch.float32)
    healthy = train(digits, 0.2, torch.float16)
    compare("learning rate 2.0 instead of 0.2, float16", healthy, digits, 2.0, torch.float16)


if __name__ == "__main__":
    main()
