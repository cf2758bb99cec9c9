"""Mixed precision: nanscan's GradScaler and the guard scan the gradients once, and say whether it was the scale.

The loss scale starts far too high, as it may after a resume. The first fp16 gradients overflow, the scaler halves
its scale until they fit, and the guard counts and names what was skipped meanwhile. `torch.amp.GradScaler` works in
its place: it checks the gradients once more and says less.

Run: python examples/amp_grad_scaler.py
"""

import warnings

import torch
from torch import nn

import nanscan


def main() -> None:
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # it is printed here instead
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, clip_norm=1.0)
    scaler = nanscan.GradScaler(device, init_scale=2.0**24)
    inputs = torch.randn(256, 16, device=device)
    targets = inputs[:, :4].sum(1, keepdim=True)

    for step in range(200):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs.float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # unscales, checks, clips the unscaled gradients, steps or skips
        scaler.update()
        if optimizer.step_was_skipped:
            report = optimizer.last_report
            print(f"step {step}: skipped, {report.bad[0].describe()}. {report.scale_note}")

    print(
        f"skipped {optimizer.skipped_steps} of 200 steps; loss {loss.item():.4f}; norm {optimizer.last_report.norm:.4f}"
    )


if __name__ == "__main__":
    main()
