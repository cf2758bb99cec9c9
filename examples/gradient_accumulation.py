"""Accumulation: one bad micro-batch costs its window. The skip clears the gradients, so the next window starts clean.

Run: python examples/gradient_accumulation.py
"""

import torch
from torch import nn

import nanscan

MICRO_BATCHES = 4  # per optimizer step


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.05), model)
    inputs = torch.rand(320, 4)
    inputs[97, 2] = 0.0  # one reading is exactly zero, and the model is fed its logarithm: -inf
    targets = inputs.sum(1, keepdim=True)

    for epoch in range(50):
        for window in torch.arange(320).split(8 * MICRO_BATCHES):
            for rows in window.split(8):
                loss = nn.functional.mse_loss(model(inputs[rows].log()), targets[rows])
                (loss / MICRO_BATCHES).backward()
            optimizer.step()
            if optimizer.step_was_skipped and epoch == 0:
                print(f"rows {window[0]}..{window[-1]}: {optimizer.last_report.bad[0].describe()}")
            optimizer.zero_grad()

    weights_finite = nanscan.scan(model).finite
    print(f"skipped {optimizer.skipped_steps} of 500 steps; loss {loss.item():.4f}; weights finite: {weights_finite}")


if __name__ == "__main__":
    main()
