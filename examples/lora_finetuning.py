"""LoRA by hand: a frozen transformer learns a new task through 192 small matrices, and one blank image costs one step.

A small vision transformer is trained on handwritten digits. Then its weights are frozen, every linear layer gets a
low-rank adapter, and the adapters (and nothing else) learn to read the same digits lying on their side. Each image is
scaled by its own mean and deviation; one is blank, so 0/0: NaN in the gradients of all adapters at once. The guard
skips the steps that draw it. The adapters are saved by themselves and put onto a fresh copy of the frozen model.

Run: python examples/lora_finetuning.py [FOLDER]      (needs scikit-learn and safetensors)
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import nanscan

WIDTH, HEADS, DEPTH, CLASSES = 32, 4, 12, 10
RANK, SCALE = 4, 2.0
BAR = TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[health]}", markup=False)


class Block(nn.Module):
    """Attention and a feed-forward part, made of eight linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.mix = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        heads = (part(y).view(batch, length, HEADS, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.norm2(x)
        return x + self.mix(self.down(F.silu(self.gate(y)) * self.up(y)))


class Digits(nn.Module):
    """An image is eight rows of eight pixels: eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(8, WIDTH), nn.Parameter(torch.randn(8, WIDTH) * 0.1)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.classify = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        images = (images - images.mean((1, 2), keepdim=True)) / images.std((1, 2), keepdim=True)
        return self.classify(self.norm(self.blocks(self.embed(images) + self.places)).mean(1))


class LoRA(nn.Module):
    """A frozen linear layer, plus a product of two thin matrices that is zero at first."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.a = nn.Parameter(torch.randn(RANK, frozen.in_features) / frozen.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(frozen.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + SCALE * F.linear(F.linear(x, self.a), self.b)


def add_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Freeze a model and give each linear layer of its blocks an adapter; returns what is left to train, by name."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LoRA(layer))
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int, lr: float, what: str) -> list:
    """Train what requires a gradient; returns the reports of the steps."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = nanscan.wrap(torch.optim.AdamW(params, lr=lr), model, clip_norm=1.0)  # the one line
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    with Progress(*BAR, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(what, total=steps, health="")
        for step in range(steps):
            rows = torch.randint(0, len(images), (64,))
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.observe(loss)
            optimizer.step()
            schedule.step()
            bar.update(task, advance=1, health=optimizer.health())
            if step % 25 == 24:
                print(f"{what}: {optimizer.health()}")
    return list(optimizer.history)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # health() and the last lines say it
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32), torch.tensor(digits.target)
    lying = images.rot90(1, (1, 2))
    lying[700] = 0.0  # a scan that came out blank

    base = Digits()
    train(base, images[:1500], labels[:1500], steps=100, lr=4e-3, what="whole model")
    print(f"upright {accuracy(base, images[1500:], labels[1500:]):.1%}", end=", ")
    print(f"lying {accuracy(base, lying[1500:], labels[1500:]):.1%}")

    model = copy.deepcopy(base)
    adapters = add_adapters(model)
    few, all_of_them = sum(p.numel() for p in adapters.values()), sum(p.numel() for p in model.parameters())
    print(f"{len(adapters)} adapter tensors, {few:,} of {all_of_them:,} numbers are trained")
    reports = train(model, lying[:1500], labels[:1500], steps=125, lr=1e-2, what="adapters")
    skips = [report for report in reports if report.skipped]
    for report in skips[:1]:
        print(f"step {report.step} skipped: {len(report.bad)} tensors, {report.bad[0].describe()}")
    after = accuracy(model, lying[1500:], labels[1500:])
    print(f"skipped {len(skips)} of {len(reports)} steps; lying {after:.1%}")

    path = nanscan.save({name: param.detach() for name, param in adapters.items()}, folder / "adapters.safetensors")
    again = copy.deepcopy(base)  # in another program: the frozen model, loaded
    add_adapters(again)
    again.load_state_dict(nanscan.load(path), strict=False)  # strict=False: the rest is the frozen model's
    same = torch.equal(again(lying[1500:]), model(lying[1500:]))
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB; loaded onto the frozen model, same answers: {same}")


if __name__ == "__main__":
    main()
