"""An Accelerate loop with gradient accumulation: the optimizer, the accelerator and the schedule agree on a skip.

Run: python examples/accelerate_loop.py            (or: accelerate launch examples/accelerate_loop.py)
"""

import warnings

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nanscan
from nanscan.integrations.accelerate import prepare


def make_data() -> TensorDataset:
    """512 rows of 8 measurements, each row scaled to mean 0 and deviation 1. Row 300 is constant: 0/0, so NaN."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(512, 8, generator=generator)
    targets = rows @ torch.linspace(-1, 1, 8) / rows.std(1)
    rows[300] = 5.0  # a sensor that stood still
    return TensorDataset((rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True), targets)


def main() -> None:
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.99)
    loader = DataLoader(make_data(), batch_size=16, shuffle=True)
    model, optimizer, scheduler, loader = prepare(  # instead of accelerator.prepare
        accelerator, model, optimizer, scheduler, loader, clip_norm=1.0
    )

    for epoch in range(20):
        for rows, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(rows).squeeze(1), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.optimizer_step_was_skipped and epoch < 2:
                accelerator.print(f"epoch {epoch}: {optimizer.last_report.describe()[:60]}")

    steps = len(optimizer.history)
    learning_rate = optimizer.param_groups[0]["lr"]
    assert abs(learning_rate - 2e-2 * 0.99 ** (steps - optimizer.skipped_steps)) < 1e-9  # it waits at a skip
    inputs, targets = make_data()[:300]
    error = nn.functional.mse_loss(model(inputs).squeeze(1), targets).item()
    accelerator.print(f"skipped {optimizer.skipped_steps} of {steps} steps, learning rate {learning_rate:.2g}")
    accelerator.print(f"mean squared error {error:.4f}")


if __name__ == "__main__":
    main()
