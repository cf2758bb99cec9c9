"""The ends of a process: exit, SIGTERM, fork. Real processes, forked from one that has everything imported."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from nanscan import CheckpointError, CheckpointManager
from nanscan.manager import exits
from tests.manager_runs import leftovers, steps_of
from tests.resume.forks import Warm

SETUP = """
import os, signal, sys, threading, time, warnings
import torch
from torch import nn
import nanscan
from nanscan import CheckpointManager
from nanscan.manager import manager as manager_module

model = nn.Linear(100, 100)
torch.optim.SGD(model.parameters())  # what torch imports at the first optimizer is imported now
real_save = manager_module.save

def slow_save(state, path, **options):
    print("writing", flush=True)
    time.sleep(0.3)
    return real_save(state, path, **options)

manager_module.save = slow_save
"""


@pytest.fixture(scope="module")
def warm() -> Any:
    with Warm(SETUP) as server:
        yield server


def run(warm: Warm, tmp_path: Path, code: str) -> Any:
    return warm.fork(f"folder = {str(tmp_path)!r}\n" + textwrap.dedent(code))


def test_interpreter_exit_waits_for_what_is_pending(warm: Warm, tmp_path: Path) -> None:
    child = run(
        warm,
        tmp_path,
        """
        manager = CheckpointManager(folder)
        manager.save(1, model=model)
        manager.save(2, model=model)
        """,
    )
    assert child.wait() == 0
    assert steps_of(CheckpointManager(tmp_path)) == [1, 2] and leftovers(tmp_path) == []


def test_unhandled_exception_and_sys_exit_wait_too(warm: Warm, tmp_path: Path) -> None:
    code = "manager = CheckpointManager(folder); manager.save({}, model=model); {}"
    assert run(warm, tmp_path, code.format(1, "sys.exit(3)")).wait() == 3
    assert run(warm, tmp_path, code.format(2, "1 / 0")).wait() == 1
    assert steps_of(CheckpointManager(tmp_path)) == [1, 2]


def test_error_that_is_left_at_exit_is_printed(warm: Warm, tmp_path: Path) -> None:
    child = run(
        warm,
        tmp_path,
        """
        manager = CheckpointManager(folder)
        nn.init.constant_(model.bias, float("nan"))
        manager.save(1, model=model)
        """,
    )
    assert child.wait() == 0
    assert "was not saved: " in child.errors() and "bias" in child.errors()


# ---- SIGTERM ---------------------------------------------------------------------------------------------------------


def test_sigterm_waits_for_what_is_pending_and_ends_with_its_own_status(warm: Warm, tmp_path: Path) -> None:
    child = run(
        warm,
        tmp_path,
        """
        manager = CheckpointManager(folder)
        manager.save(1, model=model)
        manager.save(2, model=model)
        print("both are on their way", flush=True)
        while True:
            time.sleep(0.01)
        """,
    )
    child.expect("both are on their way")
    child.kill(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    assert steps_of(CheckpointManager(tmp_path)) == [1, 2] and leftovers(tmp_path) == []


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_sigterm_inside_save_lets_that_save_finish(warm: Warm, tmp_path: Path, background: bool) -> None:
    child = run(
        warm,
        tmp_path,
        f"""
        manager = CheckpointManager(folder, background={background})
        if manager._background:  # a copy that takes its time
            real_copy = manager_module.copied
            def slow_copy(*arguments, **options):
                print("writing", flush=True)
                time.sleep(0.3)
                return real_copy(*arguments, **options)
            manager_module.copied = slow_copy
        manager.save(1, model=model)
        time.sleep(60)
        """,
    )
    child.expect("writing")
    child.kill(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    assert steps_of(CheckpointManager(tmp_path)) == [1] and leftovers(tmp_path) == []


def test_second_sigterm_does_not_wait(warm: Warm, tmp_path: Path) -> None:
    child = run(
        warm,
        tmp_path,
        """
        def endless_save(state, path, **options):
            print("writing", flush=True)
            time.sleep(60)
        manager_module.save = endless_save
        manager = CheckpointManager(folder)
        real_stop = manager._stop
        def stop():
            print("stopping", flush=True)
            return real_stop()
        manager._stop = stop
        manager.save(1, model=model)
        time.sleep(60)
        """,
    )
    child.expect("writing")
    child.kill(signal.SIGTERM)
    child.expect("stopping")
    child.kill(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM


def test_programs_own_handler_is_called_after_the_writing_and_decides(warm: Warm, tmp_path: Path) -> None:
    child = run(
        warm,
        tmp_path,
        """
        def own(number, frame):
            print("own", [path.name for path in manager.checkpoints()], flush=True)
            sys.exit(5)
        signal.signal(signal.SIGTERM, own)
        manager = CheckpointManager(folder)
        manager.save(1, model=model)
        time.sleep(60)
        """,
    )
    child.expect("writing")
    child.kill(signal.SIGTERM)
    child.expect("own ['step-00000001.pt']")
    assert child.wait() == 5


def test_ignored_sigterm_stays_ignored(warm: Warm, tmp_path: Path) -> None:
    child = run(
        warm,
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        manager = CheckpointManager(folder)
        os.kill(os.getpid(), signal.SIGTERM)
        print("alive", manager.stop_requested, flush=True)
        """,
    )
    child.expect("alive True")
    assert child.wait() == 0


def test_loop_that_polls_saves_the_present_state_and_ends_by_itself(warm: Warm, tmp_path: Path) -> None:
    child = run(
        warm,
        tmp_path,
        """
        with CheckpointManager(folder, every_steps=10**6, on_sigterm="stop") as manager:
            print("training", flush=True)
            for step in range(1, 10**9):
                time.sleep(0.001)
                if manager.stop_requested:
                    manager.save(step, model=model, force=True)
                    break
        print("ended", flush=True)
        """,
    )
    child.expect("training")
    child.kill(signal.SIGTERM)
    child.expect("ended")
    assert child.wait() == 0
    assert len(CheckpointManager(tmp_path).checkpoints()) == 1


def test_second_sigterm_ends_a_loop_that_does_not_poll(warm: Warm, tmp_path: Path) -> None:
    child = run(
        warm,
        tmp_path,
        """
        manager = CheckpointManager(folder, on_sigterm="stop")
        os.kill(os.getpid(), signal.SIGTERM)
        print("alive", manager.stop_requested, flush=True)
        manager.save(1, model=model)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        """,
    )
    child.expect("alive True")
    assert child.wait() == -signal.SIGTERM
    assert steps_of(CheckpointManager(tmp_path)) == [1]


def test_handler_goes_with_the_last_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "_open", weakref.WeakSet())  # without those that other tests left open
    monkeypatch.setattr(exits, "_previous", None)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        first, second = CheckpointManager(tmp_path / "a"), CheckpointManager(tmp_path / "b")
        assert signal.getsignal(signal.SIGTERM) is exits._on_sigterm
        first.close()
        assert signal.getsignal(signal.SIGTERM) is exits._on_sigterm
        second.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handler_that_somebody_installed_later_is_not_taken_away(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def later(number: int, frame: Any) -> None:
        pass

    try:
        with CheckpointManager(tmp_path):
            signal.signal(signal.SIGTERM, later)
        assert signal.getsignal(signal.SIGTERM) is later
    finally:
        signal.signal(signal.SIGTERM, before)
        exits._previous = None


def test_manager_that_leaves_sigterm_alone_or_is_made_in_a_thread_installs_nothing(tmp_path: Path) -> None:
    import threading

    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path, on_sigterm=None):
        assert signal.getsignal(signal.SIGTERM) is before
    made: list[CheckpointManager] = []
    thread = threading.Thread(target=lambda: made.append(CheckpointManager(tmp_path)))
    thread.start()
    thread.join()
    made[0].save(1, model=nn.Linear(1, 1))
    made[0].close()
    assert signal.getsignal(signal.SIGTERM) is before


# ---- forks -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_forked_process_neither_writes_nor_waits(warm: Warm, tmp_path: Path) -> None:
    child = run(
        warm,
        tmp_path,
        """
        manager = CheckpointManager(folder)
        manager.save(1, model=model)
        pid = os.fork()
        if pid == 0:
            try:
                manager.save(2, model=model)
            except nanscan.CheckpointError as error:
                print("refused", error, flush=True)
            manager.flush()
            manager.close()
            sys.exit(0)  # runs the exit hooks
        print("status", os.waitpid(pid, 0)[1], flush=True)
        manager.close()
        """,
    )
    child.expect("from which this one was forked")
    child.expect("status 0")
    assert child.wait() == 0
    assert steps_of(CheckpointManager(tmp_path)) == [1]


def test_forked_process_dies_of_sigterm_at_once_and_the_owner_goes_on(warm: Warm, tmp_path: Path) -> None:
    child = run(
        warm,
        tmp_path,
        """
        manager = CheckpointManager(folder)
        manager.save(1, model=model)
        is_up, up = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(up, b"!")
            while True:
                time.sleep(0.01)
        os.read(is_up, 1)
        os.kill(pid, signal.SIGTERM)
        print("status", os.waitpid(pid, 0)[1], flush=True)
        manager.save(2, model=model)
        manager.close()
        """,
    )
    child.expect(f"status {int(signal.SIGTERM)}")
    assert child.wait() == 0
    assert steps_of(CheckpointManager(tmp_path)) == [1, 2]


def test_forked_process_may_have_a_manager_of_its_own(warm: Warm, tmp_path: Path) -> None:
    child = run(
        warm,
        tmp_path,
        """
        manager = CheckpointManager(folder)
        manager.save(1, model=model)
        pid = os.fork()
        if pid == 0:
            own = CheckpointManager(folder + "/own")
            own.save(5, model=model)
            sys.exit(0)
        print("status", os.waitpid(pid, 0)[1], flush=True)
        """,
    )
    child.expect("status 0")
    assert child.wait() == 0
    assert steps_of(CheckpointManager(tmp_path / "own")) == [5]
    assert steps_of(CheckpointManager(tmp_path)) == [1]


def test_workers_of_a_loader_leave_the_checkpoints_alone(warm: Warm, tmp_path: Path) -> None:
    child = run(
        warm,
        tmp_path,
        """
        manager = CheckpointManager(folder)
        manager.save(1, model=model)
        loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2, multiprocessing_context="fork")
        print("sum", sum(int(batch) for batch in loader), flush=True)
        manager.close()
        """,
    )
    child.expect("sum 28")
    assert child.wait() == 0
    assert steps_of(CheckpointManager(tmp_path)) == [1] and leftovers(tmp_path) == []
    assert child.errors() == ""


def test_manager_names_its_owner_when_a_forked_process_uses_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager._pid = os.getpid() + 1
    with pytest.raises(CheckpointError, match=f"belongs to process {os.getpid() + 1}"):
        manager.save(1)
