"""Digits with three bad rows in them: each batch is looked at before the model sees it, and the bad ones are left out.

Run: python examples/checked_loader.py                   (needs scikit-learn: pip install 'nanscan[demo]')
     python examples/checked_loader.py --on-bad raise    stops at the first one instead
"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nanscan
from nanscan.demo.data import load_digits


def spoilt_rows() -> tuple[TensorDataset, Tensor, Tensor]:
    """The training rows, three of them as they come out of a careless pipeline; and clean rows for testing."""
    digits = load_digits()
    images, labels = digits.train_images.clone(), digits.train_labels.clone()
    images[100] /= 0 * images[100].max()  # scaled by its own range, which was taken to be 0
    images[400] *= 255  # scaled to 0..255 while the others are 0..1
    labels[900] = 10  # counted from 1
    return TensorDataset(images, labels), digits.test_images, digits.test_labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on-bad", choices=["raise", "skip", "warn"], default="skip")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # each skip would be warned about; they are listed below

    rows, test_images, test_labels = spoilt_rows()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    loader = DataLoader(rows, batch_size=32, shuffle=True)
    spec = nanscan.BatchSpec.from_model(model, value_range=(0, 1))
    print(f"read off the model: {spec.num_classes} classes")
    loader = nanscan.CheckedLoader(loader, spec, on_bad=arguments.on_bad)  # the one line

    for _ in range(10):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    for bad in loader.bad_batches[:3]:
        print(f"epoch {bad.epoch}, batch {bad.index}: {bad.problems[0]}")
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).double().mean().item()
    print(f"skipped {loader.skipped_batches} of {10 * len(loader)} batches; accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
