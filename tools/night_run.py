"""A small language model trained through a bad night, for tools/screenshots.py: spikes, NaN, a rollback."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings

import torch
from torch import Tensor, nn

import nanscan

WIDTH, WORDS, LENGTH = 32, 64, 17


class UnitNorm(nn.Module):
    """Divides by the norm: 0/0 for a vector of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x / x.norm(dim=-1, keepdim=True))


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = UnitNorm()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.feed(x)


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(words)))


def batch(step: int) -> Tensor:
    """Words that follow from one another; some batches have padding, which is embedded as zeros."""
    words = torch.randint(1, WORDS, (8, LENGTH))
    words[:, 1::2] = (words[:, ::2][:, : LENGTH // 2] * 3 + 1) % (WORDS - 1) + 1
    if step == 130 or 300 <= step < 303:
        words[0, 3] = 0
    return words


def main(log: str, steps: int, pause: float) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    clip = nanscan.AdaptiveClip("zclip")
    optimizer = nanscan.wrap(inner, model, clip_norm=clip, on_spike="skip", log=log, find_origin=True)
    recovery = nanscan.Recovery(model, optimizer, patience=3)
    with contextlib.ExitStack() as stack:
        stack.enter_context(nanscan.watch(model, log=log))
        manager = stack.enter_context(nanscan.CheckpointManager("checkpoints", every_steps=50, on_sigterm=None))
        for step in range(steps):
            words = batch(step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            loss = loss * 300 if step in (210, 211) else loss
            loss.backward()
            optimizer.observe(loss)
            optimizer.step()
            recovery.step()
            manager.save(step, model=model, optimizer=optimizer)
            time.sleep(pause)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
