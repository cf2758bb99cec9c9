"""Accumulation: a bad micro-batch costs its whole window, or, with `drop=True`, only itself.

Run: python examples/gradient_accumulation.py
"""

import warnings

import torch
from torch import nn

import nanscan

MICRO_BATCHES = 4  # per optimizer step


def train(drop: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.05), model)
    inputs = torch.rand(320, 4)
    inputs[97, 2] = 0.0  # one reading is exactly zero, and the model is fed its logarithm: -inf
    targets = inputs.sum(1, keepdim=True)
    dropped = 0

    for epoch in range(50):
        for window in torch.arange(320).split(8 * MICRO_BATCHES):
            for rows in window.split(8):
                loss = nn.functional.mse_loss(model(inputs[rows].log()), targets[rows])
                (loss / MICRO_BATCHES).backward()
                report = optimizer.check_microbatch(loss, drop=drop)
                if not report.finite and epoch == 0:
                    print(f"  rows {rows[0]}..{rows[-1]}: {report.describe()}")
            optimizer.step()
            dropped += len(optimizer.last_report.dropped)
            optimizer.zero_grad()

    print(f"  skipped {optimizer.skipped_steps} of 500 steps, dropped {dropped} of 2000 micro-batches;", end=" ")
    print(f"loss {loss.item():.4f}; weights finite: {nanscan.scan(model).finite}")


def main() -> None:
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # it is printed here instead
    print("check_microbatch names it, and the step is skipped:")
    train(drop=False)
    print("drop=True gives up only the bad micro-batch:")
    train(drop=True)


if __name__ == "__main__":
    main()
