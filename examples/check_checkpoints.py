"""A folder of checkpoints is checked at the end of the night, file by file; the exit code says whether all are good.

A file is good if it is whole (its digests or check sums fit), opens without running code, and every tensor in it is
finite. Nothing in a file is run, whatever it asks for. Put it behind a training job, or into cron.

Run: python examples/check_checkpoints.py FOLDER; echo $?      0: all good, 1: not all, 2: no checkpoints there
     python examples/check_checkpoints.py                      makes a folder with good and bad ones first

`nanscan scan FOLDER` on the command line looks for NaN and Inf, too, and holds no more than a part of a file in memory.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from torch import nn

import nanscan
from nanscan.files import read

SUFFIXES = {".pt", ".pth", ".ckpt", ".safetensors", ".h5"}


def check(path: Path) -> tuple[str, str]:
    """A word for what a file is worth, and what is wrong with it."""
    try:
        nanscan.load(path)  # compares digests; runs no code
        floats = ((name, tensor) for name, tensor in read(path) if tensor.is_floating_point() or tensor.is_complex())
        bad = [row.describe() for name, tensor in floats for row in nanscan.scan({name: tensor}).bad]
    except nanscan.CorruptCheckpoint as error:
        return "damaged", str(error).partition(". ")[0]  # what follows says what to do
    except nanscan.CheckpointError as error:
        return "refused", str(error).partition(". ")[0]
    except OSError as error:
        return "unread", str(error)
    more = f"; and {len(bad) - 2} more" if len(bad) > 2 else ""
    return ("not finite", "; ".join(bad[:2]) + more) if bad else ("good", "")


def make_night(folder: Path) -> None:
    """A training run that left good checkpoints behind, and what else happens to files in a night."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = nanscan.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    with nanscan.CheckpointManager(folder, keep=3, every_steps=50) as manager:
        for step in range(1, 201):
            inputs = torch.randn(32, 8)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True)).backward()
            optimizer.step()
            manager.save(step, model=model, optimizer=optimizer)

    newest = manager.checkpoints()[-1]
    newest.write_bytes(newest.read_bytes()[:5000])  # the disk was full while it was copied
    torch.save(model, folder / "colleague.pt")  # a whole model: loading it imports and calls what the file names
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)  # a run without a guard
    model(torch.full((1, 8), -1.0).log()).sum().backward()
    plain.step()
    torch.save({"model": model.state_dict(), "optimizer": plain.state_dict()}, folder / "unguarded.pt")


def main() -> int:
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
    else:
        folder = Path(tempfile.mkdtemp())
        make_night(folder)
    paths = [path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    paths.sort(key=lambda path: path.stat().st_mtime)
    if not paths:
        print(f"no checkpoints in {folder}", file=sys.stderr)
        return 2

    bar = track(paths, "checking", disable=not sys.stdout.isatty(), transient=True)
    verdicts = {path: check(path) for path in bar}
    table = Table(box=None, pad_edge=False)
    for column in ("file", "verdict", "what is wrong"):
        table.add_column(column, overflow="fold")
    for path, (word, why) in verdicts.items():
        style = "green" if word == "good" else "bold red"
        table.add_row(Text(str(path.relative_to(folder))), Text(word, style), Text(why))
    Console(width=None if sys.stdout.isatty() else 120).print(table)

    good = [path for path, (word, _) in verdicts.items() if word == "good"]
    print(f"{len(good)} of {len(paths)} good; go on from {good[-1] if good else 'none'}")
    return 0 if len(good) == len(paths) else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)
    sys.exit(main())
