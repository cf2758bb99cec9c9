"""What the tests of recovery share: a small training run, and its whole state to be compared bit for bit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

import nanscan
from nanscan.rng import rng_state
from nanscan.state_copy import copy_state
from tests.guarded import bits


def make_model(seed: int = 0) -> nn.Module:
    """Tied weights, a frozen layer, dropout, and BatchNorm's buffers; all random numbers start anew."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 4), nn.Linear(4, 1)
    )
    model[4].weight = model[0].weight
    model[5].requires_grad_(False)
    return model


def make_batch(seed: int, bad: float | None = None) -> Tensor:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    if bad is not None:
        inputs[2, 1] = bad
    return inputs


def train(model: nn.Module, optimizer: optim.Optimizer, inputs: Tensor) -> Tensor:
    """One step; also draws random numbers beside PyTorch's."""
    optimizer.zero_grad()
    loss = (model(inputs) - random.random() - np.random.rand()).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def spoil(model: nn.Module) -> None:
    """As an update does that divides by 0: one weight is NaN."""
    with torch.no_grad():
        next(model.parameters())[0, 1] = float("nan")


def everything(model: nn.Module, optimizer: optim.Optimizer, scheduler: Any = None, scaler: Any = None) -> Any:
    """Weights, buffers, optimizer, scheduler, scaler and random numbers, as copies that compare bit for bit."""
    return {
        "model": bits(dict(model.state_dict())),
        "buffers": bits(dict(model.named_buffers())),
        "optimizer": bits(optimizer.state_dict()),
        "scheduler": None if scheduler is None else copy_state(scheduler.state_dict()),
        "scaler": None if scaler is None else scaler.state_dict(),
        "rng": bits(rng_state()),
    }


def without_lr(state: Any) -> Any:
    """`everything` without the learning rates, wherever they are kept."""
    names = {"lr", "initial_lr", "max_lr", "min_lr", "base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr"}
    if isinstance(state, dict):
        return {key: without_lr(value) for key, value in state.items() if key not in names}
    return [without_lr(item) for item in state] if isinstance(state, list) else state


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that are expected here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nanscan.NonFiniteWarning)
        yield


Make = Callable[[list[nn.Parameter]], optim.Optimizer]


def guarded(model: nn.Module, **options: Any) -> nanscan.GuardedOptimizer:
    return nanscan.wrap(optim.Adam(model.parameters(), lr=0.01), model, **options)


def run(model: nn.Module, optimizer: optim.Optimizer, recovery: nanscan.Recovery, steps: int) -> None:
    for step in range(steps):
        train(model, optimizer, make_batch(step))
        assert recovery.step() is False
