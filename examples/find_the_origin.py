"""A loss that is NaN for some batches: which op made it, on which line, and what to do.

Run: python examples/find_the_origin.py
"""

import warnings

import torch
from torch import nn

import nanscan


class Pool(nn.Module):
    """The mean over the tokens that are there: 0/0 for a sample without any."""

    def forward(self, tokens: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        kept = tokens * there.unsqueeze(-1)
        return kept.sum(1) / there.sum(1, keepdim=True)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.pool = Pool()
        self.head = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.embed(ids), there))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 100, (8, 6), generator=generator)
    there = torch.ones(8, 6)
    if step == 5:
        there[3] = 0.0  # an empty document
    return ids, there, torch.randint(0, 3, (8,), generator=generator)


def main() -> None:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = nanscan.wrap(optimizer, model, find_origin=True)  # looks by itself at the first skipped step
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # this script prints what the warning says

    for step in range(10):
        ids, there, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids, there), labels).backward()
        optimizer.step()
        if optimizer.step_was_skipped:
            print(f"step {step} was skipped")
            print(optimizer.last_report.origin)

    # The same by hand, for one step:
    ids, there, labels = batch(5)
    with nanscan.trace(model) as t:
        nn.functional.cross_entropy(model(ids, there), labels).backward()
    assert t.origin is not None
    print(f"traced by hand: {t.origin.op} in '{t.origin.module}', sample {t.origin.outputs[0].first_bad[0]}")


if __name__ == "__main__":
    main()
