"""A character-level GPT learns English from the documentation that comes with Python, and ends with a report.

The text is `pydoc_data.topics`, which `help("topics")` reads: it is part of every Python. Gradients are checked and
clipped, each step is a line in a log, and at the end `nanscan report` makes a page of it: norms, clip factors, each
layer. Then the model writes a few lines. With --bf16 the forward pass runs under autocast in bfloat16, which has the
range of float32 and so needs no loss scale.

Run: python examples/char_gpt.py [--out FOLDER] [--steps 300] [--bf16]
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.nn import functional as F

import nanscan

WIDTH, HEADS, DEPTH, LENGTH, BATCH = 64, 4, 2, 64, 32
BAR = TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[health]}", markup=False)


class Block(nn.Module):
    """Causal attention and a feed-forward part, each behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.query_key_value(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Characters and places are embedded; the head shares the characters' embedding."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(DEPTH))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.head.weight = self.characters.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.characters(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def windows(text: Tensor, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Random pieces of the text, and the same one character further on."""
    starts = torch.randint(0, len(text) - length - 1, (count,)).unsqueeze(1) + torch.arange(length)
    return text[starts], text[starts + 1]


def train(model: GPT, text: Tensor, steps: int, bf16: bool, log: Path) -> None:
    device = text.device.type
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    optimizer = nanscan.wrap(inner, model, clip_norm=1.0, find_origin=True, log=log)  # the one line
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps, pct_start=0.1)
    with Progress(*BAR, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("training", total=steps, health="")
        for step in range(steps):
            ids, following = windows(text, LENGTH, BATCH)
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                loss = F.cross_entropy(model(ids).flatten(0, 1).float(), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.observe(loss)
            optimizer.step()
            schedule.step()
            bar.update(task, advance=1, health=optimizer.health())
            if (step + 1) % 50 == 0:
                print(optimizer.health())


@torch.no_grad()
def sample(model: GPT, start: Tensor, count: int, temperature: float = 0.7) -> Tensor:
    """`start` and `count` characters more, each drawn from what the model holds likely."""
    for _ in range(count):
        scores = model(start[None, -LENGTH:])[0, -1]
        start = torch.cat([start, torch.multinomial((scores / temperature).softmax(0), 1)])
    return start


def main() -> None:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = arguments.out / "char_gpt.jsonl"
    log.unlink(missing_ok=True)  # one that is there would be continued
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    words = "\n".join(topics[name] for name in sorted(topics))
    words = "".join(c for c in words if c.isascii() and (c.isprintable() or c == "\n"))
    characters = sorted(set(words))
    text = torch.tensor([characters.index(c) for c in words], device=device)
    print(f"{len(words):,} characters, {len(characters)} different")
    train_part, test_part = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]

    model = GPT(len(characters)).to(device)
    train(model, train_part, arguments.steps, arguments.bf16, log)
    with torch.no_grad():
        ids, following = windows(test_part, LENGTH, 256)
        loss = F.cross_entropy(model(ids).flatten(0, 1), following.flatten()).item()
    print(f"loss on text it has not seen: {loss:.3f} nats a character (by chance {math.log(len(characters)):.3f})")

    start = torch.tensor([characters.index(c) for c in "The "], device=device)
    print("--- it writes:\n" + "".join(characters[i] for i in sample(model, start, 200).tolist()) + "\n---")
    subprocess.run([sys.executable, "-m", "nanscan", "report", log], check=True)  # or by hand: nanscan report FILE


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("char-gpt-run"), help="folder of the log and the report")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--bf16", action="store_true", help="autocast in bfloat16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
