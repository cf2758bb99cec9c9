"""Which files stay in the folder and which go."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import nn

import nanscan
from nanscan import CheckpointError, CheckpointManager, CheckpointWarning
from nanscan.manager import folder as folder_module
from tests.manager_runs import Run, flip_byte, leftovers, steps_of


def save_steps(manager: CheckpointManager, steps: Any, model: nn.Module | None = None, **extra: Any) -> None:
    for step in steps:
        manager.save(step, model=model or nn.Linear(2, 1), extra=extra)
    manager.flush()


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("keep", [1, 2, 5])
def test_newest_checkpoints_stay(tmp_path: Path, keep: int, background: bool) -> None:
    with CheckpointManager(tmp_path, keep=keep, background=background) as manager:
        save_steps(manager, range(1, 9))
        assert steps_of(manager) == list(range(9 - keep, 9))


def test_a_new_manager_goes_on_with_what_the_former_one_left(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=3) as manager:
        save_steps(manager, [1, 2, 3])
    with CheckpointManager(tmp_path, keep=2) as manager:
        save_steps(manager, [4])
        assert steps_of(manager) == [3, 4]


def test_damaged_checkpoints_do_not_count_and_the_last_good_one_is_never_deleted(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=9) as manager:
        save_steps(manager, [1, 2, 3, 4])
    for step in (3, 4):
        flip_byte(tmp_path / f"step-0000000{step}.pt")
    with CheckpointManager(tmp_path, keep=2) as manager:
        save_steps(manager, [5])
        assert steps_of(manager) == [2, 3, 4, 5]  # 5 and 2 are the two good ones
        save_steps(manager, [6])
        assert steps_of(manager) == [5, 6]


def test_file_that_was_damaged_after_this_manager_wrote_it_does_not_count(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=1) as manager:
        save_steps(manager, [1])
        manager.save(2, model=nn.Linear(2, 1))
        manager.flush()
        flip_byte(tmp_path / "step-00000002.pt")
        folder_step = CheckpointManager(tmp_path, keep=2, background=False)
        folder_step.save(3, model=nn.Linear(2, 1))
        assert steps_of(manager) == [2, 3]


def test_failed_save_deletes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=1, background=False) as manager:
        save_steps(manager, [1])
        with pytest.raises(CheckpointError):
            manager.save(2, extra={"bad": lambda: 0})
        assert steps_of(manager) == [1]
        assert leftovers(tmp_path) == []


def test_foreign_files_are_never_deleted(tmp_path: Path) -> None:
    names = [
        "notes.txt",
        "step-1.pt",
        "step-00000001.pth",
        "xstep-00000001.pt",
        "step-0000000x.pt",
        "step-000000001.pt",
    ]
    names += [".step-00000001.pt.123.tmp", "step-00000001.pt.tmp", ".other.pt.123.0123abcd.tmp"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "step-00000002.pt").mkdir()
    with CheckpointManager(tmp_path, keep=1) as manager:
        save_steps(manager, [3, 4, 5])
        assert steps_of(manager) == [5]
    assert all((tmp_path / name).read_text() == "mine" for name in names)
    assert (tmp_path / "step-00000002.pt").is_dir()


def test_checkpoints_of_later_steps_are_left_alone(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=9) as manager:
        save_steps(manager, [100, 110])
    with CheckpointManager(tmp_path, keep=2) as manager:
        save_steps(manager, [1, 2, 3])
        assert steps_of(manager) == [2, 3, 100, 110]


# ---- the best --------------------------------------------------------------------------------------------------------


def save_scores(manager: CheckpointManager, scores: list[Any]) -> None:
    for step, score in enumerate(scores, 1):
        manager.save(step, model=nn.Linear(2, 1), extra={"score": score})
    manager.flush()


@pytest.mark.parametrize(
    ("mode", "best_keep", "scores", "kept"),
    [
        ("max", 1, [1, 9, 2, 3, 4], [2, 5]),
        ("min", 1, [5, 1, 2, 3, 4], [2, 5]),
        ("max", 2, [8, 9, 2, 3, 4], [1, 2, 5]),
        ("max", 1, [1.0, float("nan"), 0.5, 0.2], [1, 4]),
        ("max", 1, [1.0, float("inf"), 0.5, 0.2], [1, 4]),
        ("max", 1, [float("nan"), float("nan"), float("nan")], [3]),
        ("min", 1, [torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(3.0)], [1, 3]),
        ("max", 1, [1, 1, 0, 0], [2, 4]),
        ("max", 1, [0, 1, 2, 3], [4]),
    ],
)
def test_best_by_the_metric_stays_and_nan_never_is(
    tmp_path: Path, mode: str, best_keep: int, scores: list[Any], kept: list[int]
) -> None:
    with CheckpointManager(tmp_path, keep=1, best=("score", mode), best_keep=best_keep) as manager:
        save_scores(manager, scores)
        assert steps_of(manager) == kept


def test_best_of_a_former_process_stays(tmp_path: Path) -> None:
    options: dict[str, Any] = {"keep": 1, "best": ("score", "max")}
    with CheckpointManager(tmp_path, **options) as manager:
        save_scores(manager, [1, 9, 2])
        assert manager.best_checkpoint() == tmp_path / "step-00000002.pt"
    with CheckpointManager(tmp_path, **options) as manager:
        manager.save(4, extra={"score": 5})
        manager.flush()
        assert steps_of(manager) == [2, 4]
        assert manager.best_checkpoint() == tmp_path / "step-00000002.pt"


def test_damaged_file_is_not_the_best(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=9, best=("score", "max")) as manager:
        save_scores(manager, [1, 9, 2])
        flip_byte(tmp_path / "step-00000002.pt")
        assert manager.best_checkpoint() == tmp_path / "step-00000003.pt"


@pytest.mark.parametrize(
    ("extra", "kind", "words"),
    [
        (None, ValueError, "extra has no 'score'.*it has nothing"),
        ({"loss": 1.0}, ValueError, "extra has no 'score'.*it has 'loss'"),
        ({"score": "high"}, TypeError, r"extra\['score'\] must be a number, got str"),
        ({"score": torch.ones(2)}, TypeError, r"extra\['score'\] must be a number, got Tensor"),
    ],
)
def test_missing_metric_is_an_error(tmp_path: Path, extra: Any, kind: type[Exception], words: str) -> None:
    with CheckpointManager(tmp_path, best=("score", "max")) as manager:
        with pytest.raises(kind, match=words):
            manager.save(1, extra=extra)
        assert manager.best_checkpoint() is None
    assert steps_of(manager) == []


# ---- other processes -------------------------------------------------------------------------------------------------


def test_temporary_files_of_killed_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    abandoned = tmp_path / f".step-00000001.pt.{int(dead.stdout)}.0123abcd.tmp"
    abandoned.write_bytes(b"half")
    alive = tmp_path / ".step-00000002.pt.1.0123abcd.tmp"
    lock = (
        "import fcntl,sys; f=open(sys.argv[1],'w'); fcntl.flock(f,fcntl.LOCK_EX); print('locked',flush=True); input()"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", lock, str(alive)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    try:
        with CheckpointManager(tmp_path) as manager:
            save_steps(manager, [7])
        assert leftovers(tmp_path) == [alive.name]
    finally:
        writer.communicate("")


def test_while_another_process_holds_the_lock_nothing_is_deleted_and_the_save_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "LOCK_SECONDS", 0.05)
    manager = CheckpointManager(tmp_path, keep=1, background=False)
    save_steps(manager, [1])
    with (
        FileLock(tmp_path / folder_module.LOCK_NAME),
        pytest.warns(CheckpointWarning, match="lock .* could not be taken"),
    ):
        save_steps(manager, [2])
    assert steps_of(manager) == [1, 2]
    save_steps(manager, [3])
    assert steps_of(manager) == [3]


TWO_WRITERS = """
import sys, torch
from nanscan import CheckpointManager
folder, value = sys.argv[1], float(sys.argv[2])
model = torch.nn.Linear(200, 200)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(value)
print("ready", flush=True)
input()
with CheckpointManager(folder, keep=2, background=value > 1) as manager:
    for step in range(1, 31):
        manager.save(step, model=model, extra={"value": value})
"""


def test_two_processes_on_one_folder_leave_whole_checkpoints(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    command = [sys.executable, "-c", TWO_WRITERS, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    writers = [subprocess.Popen([*command, v], text=True, env=environment, **pipes) for v in ("1", "2")]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0 and errors == "", errors
    manager = CheckpointManager(tmp_path)
    assert steps_of(manager) == [29, 30]
    assert leftovers(tmp_path) == []
    for path in manager.checkpoints():
        saved = nanscan.load(path)
        assert all((value == saved["extra"]["value"]).all() for value in saved["model"].values())


def test_checkpoint_that_another_process_removes_meanwhile_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    run = Run()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, **run.parts)
        manager.flush()
        entries = manager._folder.entries()
        gone = folder_module.Entry(2, tmp_path / "step-00000002.pt")
        monkeypatch.setattr(folder_module.Folder, "entries", lambda self: [*entries, gone])
        restored = manager.restore(**run.parts)
    assert restored is not None and restored.step == 1 and restored.passed_over == ()
    assert list(recwarn) == []


def test_later_steps_of_another_run_are_warned_about_once_before_a_restore_takes_them(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    with nanscan.CheckpointManager(tmp_path, keep=1) as manager:
        for step in (100, 200):
            manager.save(step, model=model)
    with nanscan.CheckpointManager(tmp_path, keep=1) as manager:
        with pytest.warns(nanscan.CheckpointWarning, match=r"later steps than step 10, up to step-00000200\.pt"):
            manager.save(10, model=model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.save(20, model=model)
            manager.flush()
        restored = manager.restore(model=model)
        assert restored is not None and restored.step == 200
    with nanscan.CheckpointManager(tmp_path) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.save(200, model=model)  # resumed
        manager.save(150, model=model)  # gone back within a run
