"""Logs for the tests of `nanscan report`: from a real guarded run, and written by hand in every state of repair."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch

import nanscan

EVIL = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
STEP: dict[str, Any] = {
    "finite": True, "norm": 1.5, "finite_norm": 1.5, "inf_norm": 0.5, "nan_count": 0, "inf_count": 0, "numel": 10,
    "bad": [], "origin": None, "clip_factor": 0.5, "clip_limit": None, "spike": None, "loss": 2.0, "skipped": False,
    "action": "step",
    "buffers": [], "parameters": [], "loss_scale": 1.0, "run_id": "a1",
}  # fmt: skip


def step(number: int, **other: Any) -> dict[str, Any]:
    """A line of a healthy step, with other fields."""
    return {**STEP, "step": number, "time": 1.79e9 + number / 10, **other}


def skipped(number: int, *names: str, **other: Any) -> dict[str, Any]:
    """A line of a skipped step whose tensors `names` are bad."""
    row = {
        "shape": [3],
        "dtype": "float32",
        "nan_count": 2,
        "inf_count": 1,
        "first_bad": [0],
        "rank": None,
        "kind": "grad",
    }
    facts = {"finite": False, "norm": "NaN", "nan_count": 2, "skipped": True, "action": "skip", "loss": "NaN"}
    return step(number, bad=[{"name": name, **row} for name in names or ["w"]], **{**facts, **other})


def origin(**other: Any) -> dict[str, Any]:
    """Where a NaN came from."""
    made = {"kind": "nan", "phase": "forward", "op": "aten.log", "module": "head", "file": "train.py", "line": 7}
    seen = {"name": "self", "shape": [2], "dtype": "float32", "min": -1.0, "max": 4.0, "nan_count": 0, "inf_count": 0}
    return {**made, "code": "y = x.log()", "inputs": [seen], "outputs": [], "hint": "clamp the argument first", **other}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    """Lines as they are, or as JSON."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def write_long(path: Path, steps: int, bad: frozenset[int]) -> Path:
    """A log of many steps."""
    template = json.dumps(step(0)).replace('"step": 0,', '"step": %d,').replace('"norm": 1.5,', '"norm": %s,', 1)
    norms = ("1.25", "0.75", "3.5", "0.125", "2.0")
    with path.open("w") as file:
        for number in range(steps):
            if number in bad:
                file.write(json.dumps(skipped(number, f"layers.{number % 7}.weight")) + "\n")
            else:
                file.write(template % (norms[number % 5], number) + "\n")
    return path


def train(folder: Path) -> Path:
    """A real run with everything in its log: skips, an origin, a rollback, checkpoints (one refused), ranges."""
    torch.manual_seed(0)
    log = folder / "run.jsonl"
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = nanscan.wrap(inner, model, clip_norm=0.5, log=log, find_origin=True)
    manager = nanscan.CheckpointManager(folder / "checkpoints", background=False, on_sigterm=None)
    recovery = nanscan.Recovery(model, optimizer, patience=3)
    with warnings.catch_warnings(), nanscan.watch(model, log=log):
        warnings.simplefilter("ignore")
        for number in range(40):
            x = torch.randn(8, 4)
            if number in (10, 20, 21, 22):
                x[3, 2] = float("nan")
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean() - 50.0
            loss.backward()
            optimizer.observe(loss)
            optimizer.step()
            recovery.step()
            if number == 30:
                manager.save(number, model=model, optimizer=optimizer)
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
        with contextlib.suppress(nanscan.NonFiniteError):
            manager.save(40, model=model, optimizer=optimizer)
    manager.close()
    return log
