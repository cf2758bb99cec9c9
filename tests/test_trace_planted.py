"""One faulty op at a random place of a random network: module and line must be those of that op."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanscan


class Fault(nn.Module):
    """Passes its input on, plus what a faulty op makes of it (of all of it: a ReLU before masks single gradients)."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        first = x.sum().reshape(1) * 0
        if self.kind == "log":
            bad = first.log()  # FAULT log
        elif self.kind == "div":
            bad = first / first  # FAULT div
        elif self.kind == "sqrt":
            bad = (first - 1).sqrt()  # FAULT sqrt
        elif self.kind == "exp":
            bad = (first + 1000).exp()  # FAULT exp
        else:
            bad = first.pow(0.5)  # FAULT root
        return x + bad


FORWARD = {"log": "aten.log", "div": "aten.div", "sqrt": "aten.sqrt", "exp": "aten.exp"}


def random_network(rng, kind):
    """A network with the fault somewhere in it, its path, and an input."""
    convolutional = rng.random() < 0.5
    width = rng.choice([4, 8])
    layers, blocks = [], rng.randint(2, 6)
    for _ in range(blocks):
        layer = nn.Conv2d(width, width, 3, padding=1) if convolutional else nn.Linear(width, width)
        norm = nn.BatchNorm2d(width) if convolutional else nn.LayerNorm(width)
        act = rng.choice([nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.Tanh(), nn.Dropout(0.1)])
        layers.append(nn.Sequential(layer, norm, act))
    where = rng.randrange(blocks)
    at = rng.randrange(3)
    inner = list(layers[where])
    inner.insert(at + 1, Fault(kind))
    layers[where] = nn.Sequential(*inner)
    shape = (3, width, 6, 6) if convolutional else (3, width)
    return nn.Sequential(*layers), f"{where}.{at + 1}", torch.randn(shape)


@pytest.mark.parametrize("kind", [*FORWARD, "root"])
@pytest.mark.parametrize("seed", range(12))
def test_planted_fault_is_named_with_module_and_line(kind, seed):
    torch.manual_seed(seed)
    model, path, x = random_network(random.Random(f"{kind} {seed}"), kind)
    with nanscan.trace(model) as t:
        out = model(x)
        F.mse_loss(out, torch.zeros_like(out)).backward()
    assert t.origin is not None
    assert t.origin.op == FORWARD.get(kind, "PowBackward0")
    assert t.origin.module == path
    assert t.origin.code.endswith(f"# FAULT {kind}")


@pytest.mark.parametrize("seed", range(12))
def test_the_same_network_without_the_fault_is_quiet(seed):
    torch.manual_seed(seed)
    model, path, x = random_network(random.Random(f"log {seed}"), "log")
    block, place = path.split(".")
    model[int(block)][int(place)] = nn.Identity()
    with nanscan.trace(model) as t:
        out = model(x)
        F.mse_loss(out, torch.zeros_like(out)).backward()
    assert t.origins == []
