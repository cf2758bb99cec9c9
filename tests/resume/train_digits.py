"""A training run on the digits that can be killed at any moment and started again; everything random is used."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import nanscan
from nanscan.demo.data import load_digits

DIGITS = load_digits()
EPOCHS = 3
BATCH_SIZE = 32
EVERY = 3


def noisy(images: Tensor) -> Tensor:
    """Noise of NumPy's generator, and a shift of Python's."""
    noise = torch.from_numpy(np.random.standard_normal(images.shape)).float()
    return images + 0.05 * noise + random.uniform(-0.02, 0.02)


def build() -> dict[str, Any]:
    """The parts of the run at its beginning."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    optimizer = nanscan.wrap(inner, model, clip_norm=1.0)
    loader = StatefulDataLoader(TensorDataset(DIGITS.train_images, DIGITS.train_labels), BATCH_SIZE, shuffle=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=EPOCHS * len(loader))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}


def train(folder: Path, background: bool) -> None:
    """Train to the end, from wherever the last one came to; all losses and the weights go to `final.pt`."""
    warnings.simplefilter("ignore", UserWarning)
    run = build()
    losses: list[float] = []
    with nanscan.CheckpointManager(folder, keep=2, every_steps=EVERY, background=background) as manager:
        restored = manager.restore(**run)
        first_epoch = 0
        if restored is not None:
            first_epoch, losses = restored.epoch or 0, restored.extra["losses"]
        print("resumed", len(losses), flush=True)
        for epoch in range(first_epoch, EPOCHS):
            for images, labels in run["loader"]:
                losses.append(step(run, images, labels))
                manager.save(len(losses), epoch=epoch, extra={"losses": losses}, **run)
    nanscan.save({"losses": losses, **run["model"].state_dict()}, folder / "final.pt")


def step(run: dict[str, Any], images: Tensor, labels: Tensor) -> float:
    """One step; returns its loss."""
    run["optimizer"].zero_grad()
    loss = nn.functional.cross_entropy(run["model"](noisy(images)), labels)
    loss.backward()
    run["optimizer"].step()
    run["scheduler"].step()
    return loss.item()
