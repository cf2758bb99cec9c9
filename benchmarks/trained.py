"""A training state of given shapes, to be copied and saved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["LARGE", "trained"]

LARGE: dict[str, list[tuple[int, ...]]] = {
    "24 layers of 1024": [(1024, 1024), (1024,)] * 24,
    "embedding 50k x 512": [(50_000, 512)],
}


def trained(shapes: Sequence[tuple[int, ...]]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of such parameters after one step of AdamW, whose state is twice the weights."""
    model = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model:
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer
