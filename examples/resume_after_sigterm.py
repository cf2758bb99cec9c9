"""A rented machine is taken away: SIGTERM in the middle of a run, and a second start that ends bit for bit the same.

SIGTERM only sets `manager.stop_requested`. The loop finishes its step, saves that very state, waits until it is on the
disk and ends with exit code 143 (128 + SIGTERM, what a shell says of a process that SIGTERM ended), so that whatever
started it knows that there is more to do. Started again with the same folder, the run goes on from that step. Nothing
is lost and nothing is done twice: the weights at the end are those of a run that nobody disturbed.

Run: python examples/resume_after_sigterm.py --out spiral-run --preempt     ends with 143 at step 150
     python examples/resume_after_sigterm.py --out spiral-run               goes on from there

--preempt lets the run send itself the signal in the middle of a step; `kill PID` from elsewhere does the same.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor, nn

import nanscan

STEPS, PREEMPTED = 400, 150
BAR = TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[health]}", markup=False)


def batch(count: int) -> tuple[Tensor, Tensor]:
    """Points on three spiral arms, and which arm each is on. Random: from the generator that checkpoints hold, too."""
    arms, radius = torch.randint(0, 3, (count,)), torch.rand(count).sqrt()
    angle = 2 * math.pi * arms / 3 + 5 * radius + 0.1 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arms


def train(folder: Path, preempt: bool) -> tuple[nn.Module, bool]:
    """The model, and whether the run is over."""
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))
    optimizer = nanscan.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, clip_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    run = {"model": model, "optimizer": optimizer, "scheduler": schedule}  # random generators come along by themselves

    manager = nanscan.CheckpointManager(folder / "checkpoints", keep=2, every_steps=100, on_sigterm="stop")
    with manager, Progress(*BAR, disable=not sys.stdout.isatty()) as bar:
        restored = manager.restore(**run)  # None the first time
        first = restored.step if restored else 0
        print(f"process {os.getpid()} begins at step {first}")
        task = bar.add_task("training", total=STEPS, completed=first, health="")
        for step in range(first + 1, STEPS + 1):
            points, arms = batch(128)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(points), arms).backward()
            if preempt and step == PREEMPTED:
                os.kill(os.getpid(), signal.SIGTERM)
            optimizer.step()
            schedule.step()
            bar.update(task, advance=1, health=optimizer.health())
            manager.save(step, force=manager.stop_requested, **run)  # when it is due, or at once
            if step % 100 == 0:
                print(optimizer.health())
            if manager.stop_requested:
                print(f"SIGTERM: saved step {step}, start me again")
                return model, step == STEPS
    return model, True  # leaving `with` has waited for the disk


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("spiral-run"), help="folder of the run")
    parser.add_argument("--preempt", action="store_true", help=f"send SIGTERM to this process in step {PREEMPTED}")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model, over = train(arguments.out, arguments.preempt)
    if not over:
        return 128 + signal.SIGTERM
    nanscan.save(model.state_dict(), arguments.out / "final.pt")
    model.eval()
    points, arms = batch(1000)
    print(f"done: accuracy {(model(points).argmax(1) == arms).float().mean():.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
