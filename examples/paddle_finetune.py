"""PaddlePaddle: three ways in which fine-tuning a small BERT turns to NaN, with a plain optimizer and a guarded one.

A text is a row of word ids; its label says whether the word "but" comes before or after the word "good". Three things
go wrong that people meet, and in each the NaN comes out of the arithmetic:

- too long: a text longer than the model's 16 positions is cut into windows, and what is left for the last one of some
  is padding only; the mean over its words is 0 / 0;
- overflow: words come with weights, activations are rounded to float16 as mixed precision does, and one text has
  weights that nobody scaled (300,000 instead of 1): beyond 65,504 is Inf, and the layer norm takes Inf - Inf;
- learning rate: momentum with a rate that is far too high, and no clipping: weights grow until they are Inf.

Run: python examples/paddle_finetune.py
"""

from __future__ import annotations

import warnings

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from nanscan.integrations.paddle import wrap

WORDS, POSITIONS, WIDTH, HEADS = 40, 16, 32, 4
GOOD, BUT = 1, 2
STEPS = {"too long": 100, "overflow": 100, "learning rate": 150}
BATCH = 32


class Attention(nn.Layer):
    """Self-attention that hides padding."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: paddle.Tensor, hidden: paddle.Tensor) -> paddle.Tensor:
        batch, length, _ = x.shape
        parts = self.query_key_value(x).reshape([batch, length, 3, HEADS, WIDTH // HEADS]).transpose([2, 0, 3, 1, 4])
        scores = paddle.matmul(parts[0], parts[1], transpose_y=True) * (WIDTH // HEADS) ** -0.5
        attention = F.softmax(scores.masked_fill(hidden, -float("inf")))
        return self.out(paddle.matmul(attention, parts[2]).transpose([0, 2, 1, 3]).reshape([batch, length, WIDTH]))


class Block(nn.Layer):
    """Attention and a feed-forward part, each followed by a layer norm, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: paddle.Tensor, hidden: paddle.Tensor) -> paddle.Tensor:
        x = self.norm1(x + self.attention(x, hidden))
        return self.norm2(x + self.feed_forward(x))


class Bert(nn.Layer):
    """Word and position embeddings, two blocks, and a head over the mean of the words."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.half = half
        self.blocks = nn.LayerList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: paddle.Tensor, counts: paddle.Tensor) -> paddle.Tensor:
        hidden = (ids == 0).unsqueeze([1, 2])
        x = (self.words(ids) + self.positions(paddle.arange(ids.shape[1]))) * counts.unsqueeze(2)
        x = x.astype("float16").astype("float32") if self.half else x
        for block in self.blocks:
            x = block(x, hidden)
        there = (ids != 0).astype("float32").unsqueeze(2)
        return self.head((x * there).sum(1) / there.sum(1))


def texts(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Word ids (0: padding), their weights, and labels."""
    ids, labels = np.zeros((count, POSITIONS), "int64"), np.zeros(count, "int64")
    for row in range(count):
        length = rng.integers(6, POSITIONS + 1)
        ids[row, :length] = rng.integers(3, WORDS, length)
        first, second = sorted(rng.choice(length, 2, replace=False))
        labels[row] = rng.integers(2)
        ids[row, first], ids[row, second] = (BUT, GOOD) if labels[row] else (GOOD, BUT)
    return ids, np.ones((count, POSITIONS), "float32"), labels


def batches(trouble: str, rng: np.random.Generator):
    """The batches of one run; now and then one has the troublesome text in it."""
    for step in range(STEPS[trouble]):
        ids, counts, labels = texts(rng, BATCH)
        if trouble == "too long" and step % 40 == 20:
            document = ids[4, ids[4] != 0]  # 16 words at most: its second window is empty
            ids[5] = np.pad(document, (0, 2 * POSITIONS - len(document)))[POSITIONS:]
        if trouble == "overflow" and step % 40 == 20:
            counts[7] = 300_000.0
        yield paddle.to_tensor(ids), paddle.to_tensor(counts), paddle.to_tensor(labels)


def optimizer_for(trouble: str, model: nn.Layer, guarded: bool):
    """A plain optimizer, or the same one guarded and clipped."""
    if trouble == "learning rate":
        optimizer = paddle.optimizer.Momentum(3.0, momentum=0.9, parameters=model.parameters())
    else:
        optimizer = paddle.optimizer.AdamW(3e-3, parameters=model.parameters(), weight_decay=0.0)
    return wrap(optimizer, model, clip_norm=0.01 if trouble == "learning rate" else 1.0) if guarded else optimizer


def train(trouble: str, guarded: bool) -> tuple[float, float, str]:
    """The accuracy on new texts, the last loss, and what happened."""
    paddle.seed(0)
    rng = np.random.default_rng(0)
    model = Bert(half=trouble == "overflow")
    optimizer = optimizer_for(trouble, model, guarded)
    first = ""
    for step, (ids, counts, labels) in enumerate(batches(trouble, rng)):
        loss = F.cross_entropy(model(ids, counts), labels)
        loss.backward()
        optimizer.step()
        if guarded and optimizer.step_was_skipped and not first:
            first = f"; step {optimizer.last_report.step}: {optimizer.last_report.bad[0].describe()}"
        optimizer.clear_grad()
        if not all(bool(paddle.isfinite(weight).all()) for weight in model.parameters()):
            first = f", weights not finite after step {step}"  # and for good: no later step can mend them
            break
    ids, counts, labels = texts(np.random.default_rng(1), 500)
    with paddle.no_grad():
        right = model(paddle.to_tensor(ids), paddle.to_tensor(counts)).argmax(1).numpy() == labels
    skipped = f", skipped {optimizer.skipped_steps} of {STEPS[trouble]} steps" if guarded else ""
    return float(right.mean()), float(loss), skipped + first


def main() -> None:
    warnings.simplefilter("ignore")  # a skip is warned about; here it is printed
    for trouble in ("too long", "overflow", "learning rate"):
        print(f"{trouble}:")
        for guarded in (False, True):
            accuracy, loss, skipped = train(trouble, guarded)
            print(f"  {'guarded' if guarded else 'plain  '}  accuracy {accuracy:.1%}, loss {loss:.4f}{skipped}")


if __name__ == "__main__":
    main()
