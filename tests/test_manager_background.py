"""Background saves: consistent, bounded, and no error is lost."""

from __future__ import annotations

import gc
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanscan
from nanscan import CheckpointError, CheckpointManager, CheckpointSystemError, CheckpointWarning, NonFiniteError
from nanscan.manager import manager as manager_module
from nanscan.manager.writer import Writer
from tests.manager_runs import Run, leftovers, steps_of


class Gate:
    """Holds every write back until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.snapshots: list[Any] = []
        monkeypatch.setattr(manager_module, "save", self._save)

    def _save(self, state: Any, path: Path, **options: Any) -> Path:
        self.snapshots.append(state)
        self.started.release()
        assert self.go.acquire(timeout=60)
        return nanscan.save(state, path, **options)

    def let(self, count: int) -> None:
        for _ in range(count):
            self.go.release()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.let(100)


class FreshState:
    """Its state is a new tensor each time."""

    def __init__(self) -> None:
        self.made: weakref.ref[torch.Tensor] | None = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = torch.ones(3)
        self.made = weakref.ref(state)
        return {"state": state}


def test_of_the_state_only_the_copy_is_left_when_the_thread_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, alive = FreshState(), []
    original = Writer.submit

    def submit(*arguments: Any) -> None:
        assert part.made is not None
        alive.append(part.made())  # tensors that the training thread lets go of beside a busy one cost a turn each
        original(*arguments)

    monkeypatch.setattr(Writer, "submit", submit)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, extra={"part": part})
    assert alive == [None] and torch.equal(
        nanscan.load(tmp_path / "step-00000001.pt")["extra"]["part"]["state"], torch.ones(3)
    )


def test_the_traceback_of_a_refused_save_shows_no_frames_of_the_writing_thread(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, extra={"loss": torch.tensor(float("nan"))})
        with pytest.raises(NonFiniteError, match="NaN") as caught:
            manager.flush()
    assert len(caught.traceback) <= 4 and caught.value.__cause__ is None


def test_training_goes_on_while_the_snapshot_is_written_and_does_not_change_it(tmp_path: Path, gate: Gate) -> None:
    run = Run()
    run.step()
    with CheckpointManager(tmp_path) as manager:
        run.fill(1.0)
        wanted = run.state()
        manager.save(1, **run.parts)
        assert gate.started.acquire(timeout=60)
        for _ in range(3):
            run.step()
        run.fill(2.0)
        gate.let(1)
        manager.flush()
        other = Run(seed=1)
        manager.restore(**other.parts)
    assert all(torch.equal(a, b) for a, b in zip(other.state(), wanted, strict=True))


def in_a_thread(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_one_is_written_and_one_waits_then_the_caller_waits(tmp_path: Path, gate: Gate) -> None:
    model = nn.Linear(3, 3)
    with CheckpointManager(tmp_path, keep=9) as manager:
        manager.save(1, model=model)
        assert gate.started.acquire(timeout=60)
        manager.save(2, model=model)
        third = in_a_thread(lambda: manager.save(3, model=model))
        third.join(0.2)
        assert third.is_alive() and manager._writer.pending == 2
        gate.let(1)
        third.join(60)
        assert not third.is_alive()
        gate.let(2)
        manager.flush()
        assert steps_of(manager) == [1, 2, 3]


def test_host_memory_is_used_again(tmp_path: Path, gate: Gate) -> None:
    model = nn.Linear(30, 30)
    gate.let(100)
    with CheckpointManager(tmp_path) as manager:
        for step in range(6):
            manager.save(step, model=model)
            if step % 2:
                manager.flush()
    memory = {snapshot["model"]["weight"].data_ptr() for snapshot in gate.snapshots}
    assert len(memory) <= 2
    assert model.weight.data_ptr() not in memory


def test_second_snapshot_is_only_allocated_where_writing_is_slower_than_saving(tmp_path: Path, gate: Gate) -> None:
    model = nn.Linear(30, 30)
    gate.let(100)
    with CheckpointManager(tmp_path) as manager:
        for step in range(6):
            manager.save(step, model=model)
            manager.flush()
    assert len({snapshot["model"]["weight"].data_ptr() for snapshot in gate.snapshots}) == 1


def test_state_dicts_are_asked_for_in_the_training_thread(tmp_path: Path) -> None:
    class Loader:
        def state_dict(self) -> dict[str, int]:
            threads.append(threading.current_thread())
            return {"at": 1}

    threads: list[threading.Thread] = []
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, loader=Loader(), extra={"more": Loader()})
    assert threads == [threading.current_thread()] * 2


# ---- errors ----------------------------------------------------------------------------------------------------------


def poisoned() -> nn.Module:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.bias, float("nan"))
    return model


@pytest.mark.parametrize("call", ["flush", "close", "save", "save that is not due"])
def test_error_of_a_background_save_is_raised_by_the_next_call(tmp_path: Path, call: str) -> None:
    manager = CheckpointManager(tmp_path, every_steps=2)
    manager.save(2, model=poisoned())
    manager._writer.wait()
    calls: dict[str, Callable[[], Any]] = {
        "flush": manager.flush,
        "close": manager.close,
        "save": lambda: manager.save(4, model=nn.Linear(2, 1)),
        "save that is not due": lambda: manager.save(5, model=nn.Linear(2, 1)),
    }
    with pytest.raises(NonFiniteError, match="bias.* has 1 NaN"):
        calls[call]()
    manager.flush()  # it is raised once, and training may go on
    assert steps_of(manager) == ([4] if call == "save" else [])
    manager.close()


def test_several_errors_are_all_told(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=poisoned())
    manager._writer.wait()
    with pytest.raises(NonFiniteError):
        manager.save(2, model=poisoned())
    manager._writer.wait()
    with pytest.raises(NonFiniteError, match="step-00000002"):
        manager.save(3, model=poisoned())
    manager._writer.wait()
    manager._writer._errors.append(CheckpointError("one more"))
    with (
        pytest.warns(CheckpointWarning, match="another checkpoint was not saved: one more"),
        pytest.raises(NonFiniteError, match="step-00000003"),
    ):
        manager.close()


def test_exception_in_the_block_is_not_hidden_by_a_failed_save(tmp_path: Path) -> None:
    with (
        pytest.warns(CheckpointWarning, match="a checkpoint was not saved: .*bias"),
        pytest.raises(ZeroDivisionError),
        CheckpointManager(tmp_path) as manager,
    ):
        manager.save(1, model=poisoned())
        raise ZeroDivisionError


def test_failure_while_copying_gives_the_buffer_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise MemoryError

    with CheckpointManager(tmp_path) as manager:
        with monkeypatch.context() as broken:
            broken.setattr(manager_module, "copied", fail)
            for step in range(4):
                with pytest.raises(MemoryError):
                    manager.save(step, model=nn.Linear(1, 1))
        manager.save(5, model=nn.Linear(1, 1))
        manager.flush()
        assert steps_of(manager) == [5]


def test_save_that_is_interrupted_before_its_thread_begins_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with CheckpointManager(tmp_path) as manager:
        with monkeypatch.context() as broken:
            broken.setattr(threading.Thread, "start", interrupted)
            for step in (1, 2):
                with pytest.raises(KeyboardInterrupt):
                    manager.save(step, model=nn.Linear(1, 1))
        manager.save(3, model=nn.Linear(1, 1))  # both buffers are in use
        manager.flush()
        assert steps_of(manager) == [1, 2, 3]


def test_full_disk_in_the_background_is_one_clear_error_and_the_older_checkpoint_stays(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, model=model)
    manager.flush()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        manager.save(2, model=model)
        manager._writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(CheckpointSystemError, match="step-00000002.pt.*limit"):
        manager.flush()
    assert steps_of(manager) == [1] and leftovers(tmp_path) == []
    manager.save(3, model=model)
    manager.close()
    assert steps_of(manager) == [3]


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_training_may_go_on_where_checkpoints_can_not_be_written_and_failures_are_counted(
    tmp_path: Path, background: bool
) -> None:
    model = nn.Linear(1, 1)
    with CheckpointManager(tmp_path, background=background, on_error="warn") as manager:
        manager.save(1, model=model)
        with pytest.warns(CheckpointWarning, match=r"training goes on: .*step-00000002.*\n.*\[\"log\"\]"):
            assert (manager.save(2, model=model, extra={"log": threading.Lock()}) is None) is not background
            manager.flush()
        assert manager.failed_saves == 1
        nn.init.constant_(model.weight, float("nan"))  # which is no failure of the disk
        with pytest.raises(NonFiniteError):
            manager.save(3, model=model)
            manager.flush()
        nn.init.zeros_(model.weight)
        manager.save(4, model=model)
    assert manager.failed_saves == 2 and steps_of(manager) == [1, 4]


def test_folder_that_can_not_be_written_is_one_clear_error_and_training_may_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    manager = CheckpointManager(folder)
    folder.write_text("a file is in the way")
    manager.save(1, model=nn.Linear(1, 1))
    with pytest.raises(CheckpointSystemError, match="a part of the path is a file, not a folder"):
        manager.flush()
    folder.unlink()
    manager.save(2, model=nn.Linear(1, 1))
    manager.close()
    assert steps_of(manager) == [2]


def test_read_only_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001.pt"
    path.write_text("protected")
    path.chmod(0o400)
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=nn.Linear(1, 1))
    with pytest.raises(CheckpointSystemError):
        manager.close()
    assert path.read_text() == "protected"


def test_forgotten_manager_still_writes_and_leaves_no_thread(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, model=nn.Linear(1, 1))
    for thread in threading.enumerate():
        if thread.name == "nanscan-checkpoint-writer":
            thread.join(60)
    gc.collect()
    assert steps_of(CheckpointManager(tmp_path)) == [1]
    assert not [thread for thread in threading.enumerate() if thread.name == "nanscan-checkpoint-writer"]


def test_thread_is_kept_between_saves_and_ends_with_the_manager(tmp_path: Path) -> None:
    def writers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "nanscan-checkpoint-writer"]

    others = writers()
    manager = CheckpointManager(tmp_path)
    seen = set()
    for step in range(3):
        manager.save(step, model=nn.Linear(1, 1))
        manager.flush()
        seen |= {thread.ident for thread in writers() if thread not in others}
    assert len(seen) == 1
    (thread,) = [thread for thread in writers() if thread not in others]
    manager.close()
    thread.join(60)
    assert not thread.is_alive()


def test_due_tells_whether_a_save_would_be_made(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every_steps=2) as manager:
        assert manager.has_rhythm
        for step in range(4):
            assert manager.due(step) == (manager.save(step, model=nn.Linear(1, 1)) is not None) == (step % 2 == 0)
    assert not CheckpointManager(tmp_path).has_rhythm and CheckpointManager(tmp_path).due(1)
    with pytest.raises(ValueError, match="step must be at least 0"):
        manager.due(-1)


def test_manager_that_is_let_go_is_freed_although_its_thread_waits_for_more(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=nn.Linear(1, 1))
    manager.flush()
    alive = weakref.ref(manager)
    del manager
    gc.collect()
    assert alive() is None
