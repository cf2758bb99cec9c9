"""TensorBoard: the norm, the clip factor, skipped steps and each layer's norm as curves, and a text for each bad step.

Run: python examples/tensorboard_log.py [FOLDER], then: tensorboard --logdir FOLDER
"""

import sys
import tempfile
import warnings

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import nanscan
from nanscan.integrations.tensorboard import TensorBoardLog


def main() -> None:
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # TensorBoard shows it instead
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    writer = SummaryWriter(folder)  # your own scalars go there too; a folder instead of a writer does as well
    log = TensorBoardLog(writer, layers_every=20)
    optimizer = nanscan.wrap(inner, model, clip_norm=1.0, find_origin=True, log=[log, f"{folder}/steps.jsonl"])

    inputs = torch.rand(640, 8)
    inputs[123, 4] = -1.0  # its square root is NaN
    targets = inputs.abs().sum(1, keepdim=True)
    for _ in range(10):
        for rows in torch.arange(640).split(32):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[rows].sqrt()), targets[rows])
            loss.backward()
            optimizer.step()
            writer.add_scalar("loss", loss.item(), optimizer.last_report.step)
    writer.close()
    print(optimizer.health())
    print(f"skipped {optimizer.skipped_steps} of {len(optimizer.history)} steps; loss {loss.item():.4f}")
    print(f"tensorboard --logdir {folder}")


if __name__ == "__main__":
    main()
