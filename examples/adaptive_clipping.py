"""Clipping that follows the run, and a batch that is 1,000 times too loud.

A small network learns handwritten digits three times from the same start. In the middle comes a batch whose pixels were
not divided by 16, and whose loss was multiplied by 1,000. Without clipping the weights of a good run are lost; with
ZClip the gradients of that one step are held near their usual size; with on_spike="skip" it isn't taken at all.

Run: python examples/adaptive_clipping.py   (needs scikit-learn for its handwritten digits)
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import nanscan

LOUD = 150


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of digits that are recognised."""
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def train(**options: Any) -> tuple[nanscan.GuardedOptimizer, float]:
    """One run of 200 steps; returns its optimizer and the accuracy on what it has not seen."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.as_tensor(pixels, dtype=torch.float32) / 16, torch.as_tensor(digits)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), model, **options)
    for step in range(200):
        chosen = torch.randint(0, 1400, (32,))
        loud = 1000.0 if step == LOUD else 1.0
        loss = loud * nn.functional.cross_entropy(model(images[chosen] * min(loud, 16.0)), labels[chosen])
        optimizer.zero_grad()
        optimizer.observe(loss)
        loss.backward()
        optimizer.step()
    return optimizer, accuracy(model, images[1400:], labels[1400:])


def main() -> None:
    """Three runs, and what each did about the loud batch."""
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # it is printed below
    runs = {
        "no clipping": {},
        "zclip": {"clip_norm": nanscan.AdaptiveClip("zclip"), "on_spike": "warn"},
        "skip spikes": {"on_spike": "skip"},
    }
    for name, options in runs.items():
        optimizer, share = train(**options)
        report = optimizer.history[LOUD]
        limit = "none" if report.clip_limit is None else f"{report.clip_limit:.3g}"
        print(f"{name + ':':12} accuracy {share:.1%}, spikes {optimizer.spikes}, skipped {optimizer.skipped_steps}")
        print(f"    step {LOUD}: norm {report.norm:.3g}, limit {limit}, times {report.clip_factor:.2g}")
        if report.spike is not None:
            print(f"    {report.spike.describe()}")
    state = optimizer.guard_state_dict()
    print(f"guard_state_dict() holds {', '.join(state)}: load it to go on with the same limits")


if __name__ == "__main__":
    main()
