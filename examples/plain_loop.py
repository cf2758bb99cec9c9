"""The usual training loop with one line more: a bad row in the data costs one step, not the run.

Run: python examples/plain_loop.py
"""

import warnings

import torch
from torch import nn

import nanscan


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """512 rows of 8 measurements, each row scaled to mean 0 and deviation 1. Row 300 is constant: 0/0, so NaN."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(512, 8, generator=generator)
    targets = rows @ torch.linspace(-1, 1, 8) / rows.std(1)
    rows[300] = 5.0  # a sensor that stood still
    return (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True), targets


def main() -> None:
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # without this line each skip is warned about
    torch.manual_seed(0)
    inputs, targets = make_data()
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = nanscan.wrap(optimizer, model, clip_norm=1.0)  # the one line

    for epoch in range(20):
        for rows in torch.randperm(512).split(32):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[rows]).squeeze(1), targets[rows])
            loss.backward()
            optimizer.step()
            if optimizer.step_was_skipped and epoch == 0:
                print(f"epoch {epoch}: {optimizer.last_report.bad[0].describe()}")
        if epoch % 5 == 4:
            print(optimizer.health())

    with torch.no_grad():
        good = inputs.isfinite().all(1)
        error = nn.functional.mse_loss(model(inputs[good]).squeeze(1), targets[good])
    print(f"skipped {optimizer.skipped_steps} of 320 steps; mean squared error {error:.4f}")


if __name__ == "__main__":
    main()
