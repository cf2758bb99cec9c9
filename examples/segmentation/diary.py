"""What happened in one run, written line by line; all recipes keep the same diary, and the tables are made from it."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from task import Task, class_ious
from torch import Tensor, nn


class Diary:
    """Writes `diary.jsonl` into the folder of a run.

    Args:
        folder: made if it isn't there; the recipe puts its checkpoints and logs there, too.
        task: the epochs' test scores are taken on its scenes.
    """

    def __init__(self, folder: Path, task: Task) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._task = folder, task
        self._file = (folder / "diary.jsonl").open("w")
        self._epoch = 0

    def step(self, loss: Tensor, skipped: bool = False, rolled_back: bool = False) -> None:
        """After every step."""
        self._write("step", loss=loss.item(), skipped=bool(skipped), rolled_back=rolled_back)

    @contextmanager
    def save(self) -> Iterator[None]:
        """Around a save: a save that fails is noted, and the run goes on."""
        error, start = None, time.perf_counter()
        try:
            yield
        except Exception as caught:  # whatever pickle meets inside the model
            error = f"{type(caught).__name__}: {caught}"
        self._write("save", error=error, milliseconds=1e3 * (time.perf_counter() - start))

    def end_epoch(self, model: nn.Module) -> None:
        """After the save of an epoch."""
        finite = all(bool(weight.isfinite().all()) for weight in model.parameters())
        self._write("epoch", finite=finite, ious=class_ious(model, self._task.scenes))
        self._epoch += 1

    def end(self, error: Exception | None = None) -> None:
        """After the run; the error is the one that ended it before its time."""
        self._write("end", error=None if error is None else f"{type(error).__name__}: {error}")
        self._file.close()

    def _write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "epoch": self._epoch, **values}) + "\n")
        self._file.flush()


def has_ended(folder: Path) -> bool:
    """Whether a run in this folder came to its end."""
    path = folder / "diary.jsonl"
    return path.exists() and '{"kind": "end"' in path.read_text()


def read_diary(folder: Path) -> dict[str, Any]:
    """How a run went, from its diary.

    Returns:
        finite: whether every weight is finite at the end.
        died: the first epoch, from 0, at whose end a weight was not finite and none was mended later; None: it lives.
        steps, skipped, rollbacks: how many.
        saves, saved: how many were tried, and how many of them raised no error. save_errors: the different errors.
        save_ms: for each save, how long the training waited for it.
        mious: one an epoch. ious: per class, at the end.
        error: what ended the run before its time.
    """
    lines = [json.loads(line) for line in (folder / "diary.jsonl").read_text().splitlines()]
    kinds = ("step", "save", "epoch", "end")
    steps, saves, epochs, ends = ([line for line in lines if line["kind"] == kind] for kind in kinds)
    dead = [epoch["epoch"] for epoch in epochs if not epoch["finite"]]
    finite = epochs[-1]["finite"]
    return {
        "finite": finite,
        "died": None if finite else dead[0],
        "steps": len(steps),
        "skipped": sum(step["skipped"] for step in steps),
        "rollbacks": sum(step["rolled_back"] for step in steps),
        "saves": len(saves),
        "saved": sum(save["error"] is None for save in saves),
        "save_errors": sorted({save["error"] for save in saves if save["error"]}),
        "save_ms": [round(save["milliseconds"], 2) for save in saves],
        "mious": [sum(epoch["ious"]) / len(epoch["ious"]) for epoch in epochs],
        "ious": epochs[-1]["ious"],
        "error": ends[-1]["error"],
    }


def last_checkpoint(folder: Path) -> str:
    """Whether the newest checkpoint of a run loads and is finite: "good", "not finite", "does not load" or "none"."""
    files = sorted([*folder.glob("last.pt"), *(folder / "checkpoints").glob("step-*.pt")])
    if not files:
        return "none"
    try:
        state = torch.load(files[-1], weights_only=False)
    except Exception:  # a torn file raises whatever the unpickler meets
        return "does not load"
    weights = (state.state_dict() if isinstance(state, nn.Module) else state["model"]).values()
    return "good" if all(bool(weight.isfinite().all()) for weight in weights) else "not finite"
