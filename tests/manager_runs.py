"""A small training run whose every part can be saved, for the tests of the checkpoint manager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanscan.manager import CheckpointManager


class Run:
    """Model with dropout, momentum, a scheduler and a scaler; `step` takes one step and returns its loss."""

    def __init__(self, seed: int = 0, width: int = 4) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }

    def step(self) -> float:
        loss = self.model(torch.ones(2, 4)).pow(2).mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss.item()

    def fill(self, value: float) -> None:
        """Set every weight to `value`, so that a torn copy shows."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)

    def state(self) -> list[Tensor]:
        """Copies of all weights and optimizer tensors, for a comparison bit for bit."""
        found = [value.clone() for value in self.model.state_dict().values()]
        for entry in self.optimizer.state_dict()["state"].values():
            found += [value.clone() for value in entry.values()]
        return [*found, torch.tensor(self.optimizer.param_groups[0]["lr"]), torch.tensor(self.scaler.get_scale())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """True if two lists of tensors are equal bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def steps_of(manager: CheckpointManager) -> list[int]:
    """The steps whose files are in the folder."""
    return [int(path.stem.removeprefix("step-")) for path in manager.checkpoints()]


def flip_byte(path: Path) -> None:
    """Change one bit in the middle of a file, inside a tensor of a small checkpoint or a large one."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))


def leftovers(folder: Path) -> list[str]:
    """Names of the temporary files in a folder."""
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".tmp"))
