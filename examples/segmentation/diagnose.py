"""The diagnosis, as one would make it after the first bad night: report, origin, ranges, pickle, and the mended loss.

Run: python examples/segmentation/diagnose.py   (a minute at most; its output is quoted in docs/case_study.md)
"""

import argparse
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from data import CLASSES, load_scenes
from loss import mended_log_dice_loss
from model import MendedUNet
from task import Task
from torch import Tensor, nn

import nanscan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for log and report; default: a temporary one")
    parser.add_argument("--epochs", type=int, default=7)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # the report says it
    torch.set_num_threads(1)
    task = Task(load_scenes(), epochs=options.epochs)
    model = task.make_model()

    optimizer, ranges, bad_batch = train(model, task, out / "run.jsonl")
    print("1. The report", flush=True)
    subprocess.run([sys.executable, "-m", "nanscan", "report", "run.jsonl"], cwd=out, check=True)
    print("2. The origin")
    find_origin(model, task, *bad_batch)
    print("3. The ranges")
    largest_gradients(optimizer)
    print(ranges.describe())
    print("4. The pickle")
    for problem in nanscan.find_unpicklable(model):
        print(f"{problem.path}: {problem.reason}")
    print("5. Mended")
    mended(model, *bad_batch)


def train(
    model: nn.Module, task: Task, log: Path
) -> tuple[nanscan.GuardedOptimizer, nanscan.Watch, tuple[Tensor, Tensor]]:
    """The guarded training with its ranges watched; also the batch of the first skipped step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    optimizer = nanscan.wrap(optimizer, model, clip_norm=1.0, log=log)
    bad_batch = None
    with nanscan.watch(model, log=log) as ranges:
        for epoch in range(task.epochs):
            for images, masks in task.batches(epoch):
                optimizer.zero_grad()
                loss = task.loss(model(images), masks)
                loss.backward()
                optimizer.observe(loss)
                optimizer.step()
                if optimizer.step_was_skipped and bad_batch is None:
                    bad_batch = images, masks
    return optimizer, ranges, bad_batch


def find_origin(model: nn.Module, task: Task, images: Tensor, masks: Tensor) -> None:
    """The op that makes the NaN of this batch, and what the batch holds."""
    print(nanscan.find_origin(lambda: task.loss(model(images), masks).backward(), model))
    pixels = torch.bincount(masks.flatten(), minlength=len(CLASSES)).tolist()
    print("pixels in this batch:", dict(zip(CLASSES, pixels, strict=True)))


def largest_gradients(optimizer: nanscan.GuardedOptimizer) -> None:
    """The step with the largest finite norm, and its three largest gradients."""
    healthy = [report for report in optimizer.history if report.finite]
    norms = sorted(report.norm for report in healthy)
    largest = max(healthy, key=lambda report: report.norm)
    print(f"gradient norm: median {norms[len(norms) // 2]:.0f}, largest {largest.norm:.0f} at step {largest.step}")
    for row in sorted(largest.tensors, key=lambda row: -row.norm)[:3]:
        print(f"    {row.name}: {row.norm:.0f}")


def mended(model: nn.Module, images: Tensor, masks: Tensor) -> None:
    """What the mended loss says of the bad batch, and whether the mended model pickles."""
    loss = mended_log_dice_loss(model(images), masks)
    print(f"the loss of the bad batch: {loss.item():.1f}")
    print(f"what can't be pickled: {nanscan.find_unpicklable(MendedUNet())}")


if __name__ == "__main__":
    main()
