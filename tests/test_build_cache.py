"""Builds that several processes share: done once, never torn, and never stuck on a dead builder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from nanscan.engine.build_cache import BuildFailed, build_once
from tests.build_support import Tree, copy_tree, fake_compiler, finish, only

LOAD = "from nanscan.engine import build; print(build.load_native().__file__)"
HOLD_LOCK = """
import sys, time
from filelock import FileLock
FileLock(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return copy_tree(tmp_path / "tree", tiny=True)


def planned(tree: Tree) -> Path:
    """Where the tree's module will be; its folder is there already, as after a build that did not end."""
    ran = tree.run("from nanscan.engine import build; print(build._plan_native()[0])")
    assert ran.code == 0, ran.err
    module = Path(ran.out.strip())
    module.parent.mkdir(parents=True)
    return module


def product(work: Path) -> Path:
    path = work / "product"
    path.write_text("new")
    return path


def test_what_is_there_is_not_built_again(tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.write_text("old")
    assert build_once(target, "it", product, 5) == target
    assert target.read_text() == "old"


def test_a_build_says_one_line_and_leaves_only_target_and_lock(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "entry" / "engine"
    build_once(target, "the engine", product, 5)
    assert target.read_text() == "new"
    assert sorted(path.name for path in target.parent.iterdir()) == ["build.lock", "engine"]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"nanscan: building the engine, once, into {tmp_path / 'entry'} ... done in ")
    assert err.count("\n") == 1


def test_a_failed_build_leaves_no_target_and_frees_the_lock(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(work: Path) -> Path:
        (work / "half").write_text("torn")
        raise BuildFailed("It broke.", "Mend it.")

    target = tmp_path / "entry" / "engine"
    with pytest.raises(BuildFailed, match="It broke. Mend it."):
        build_once(target, "the engine", fail, 5)
    assert [path.name for path in target.parent.iterdir()] == ["build.lock"]
    assert "failed after" in capfd.readouterr().err
    assert build_once(target, "the engine", product, 5).read_text() == "new"


def test_what_a_dead_builder_left_is_cleared(tmp_path: Path) -> None:
    leftover = tmp_path / "work-dead"
    leftover.mkdir()
    (leftover / "lock").touch()
    build_once(tmp_path / "engine", "the engine", product, 5)
    assert not leftover.exists()


def test_a_lock_held_too_long_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "build.lock"
    with (
        FileLock(lock),
        pytest.raises(BuildFailed, match=f"has held the lock {lock} for more than 1.2 s.*NANSCAN_BUILD_TIMEOUT"),
    ):
        build_once(tmp_path / "engine", "the engine", product, 1.2)
    assert f"waiting up to 1 s for another process that is building the engine (lock: {lock})" in capfd.readouterr().err


def test_the_target_that_another_process_finished_meanwhile_is_taken(tmp_path: Path) -> None:
    target, lock = tmp_path / "engine", FileLock(tmp_path / "build.lock")
    code = "import sys; from pathlib import Path; from nanscan.engine.build_cache import build_once\n"
    code += "def fail(work): raise SystemExit('built twice')\n"
    code += "print(build_once(Path(sys.argv[1]), 'the engine', fail, 60).read_text())"
    with lock:
        waiting = subprocess.Popen(
            [sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert waiting.stderr is not None
        assert "waiting up to 60 s" in waiting.stderr.readline()  # it came while the target was not there
        target.write_text("theirs")
    assert finish(waiting).out == "theirs\n"


def test_a_cache_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildFailed, match=f"cache folder {tmp_path}/file/entry can't be used.*Set NANSCAN_CACHE_DIR"):
        build_once(tmp_path / "file" / "entry" / "engine", "the engine", product, 5)


def test_a_lock_of_a_process_that_was_killed_does_not_stop_the_build(tree: Tree) -> None:
    module = planned(tree)
    lock = module.parent / "build.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(lock)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert lock.exists()
    ran = tree.run(LOAD, NANSCAN_BUILD_TIMEOUT="5")
    assert (ran.code, ran.out) == (0, f"{module}\n"), ran.err


def test_a_lock_held_by_a_living_process_times_out_and_the_warning_names_it(tree: Tree) -> None:
    module = planned(tree)
    with FileLock(module.parent / "build.lock"):
        ran = tree.run("from nanscan.engine import build; print(build.load_native())", NANSCAN_BUILD_TIMEOUT="1.5")
    assert ran.out == "None\n", ran.err
    assert f"Another process has held the lock {module.parent / 'build.lock'} for more than 1.5 s." in ran.err


def test_a_stale_lock_of_pytorchs_own_loader_does_not_stop_the_build(tree: Tree) -> None:
    """PyTorch's loader waits for ever, and silently, for a file ``lock`` in its build folder to go away."""
    module = planned(tree)
    work = module.parent / "work-killed"
    work.mkdir()
    for folder in (module.parent, work):
        (folder / "lock").touch()
    ran = finish(tree.start(LOAD), timeout=60)
    assert (ran.code, ran.out) == (0, f"{module}\n"), ran.err
    assert not work.exists()


def test_a_builder_killed_in_the_middle_is_followed_by_a_whole_build(tree: Tree, tmp_path: Path) -> None:
    slow, calls = fake_compiler(tmp_path, "sleep 120")
    victim = tree.start(LOAD, CXX=slow)
    deadline = time.monotonic() + 60
    while not calls.exists():
        assert time.monotonic() < deadline, "the compiler was never called"
        time.sleep(0.05)
    work = only(tree.cache, "cpu-*/work-*")
    os.killpg(victim.pid, signal.SIGKILL)
    finish(victim)
    fast, _ = fake_compiler(tmp_path, 'exec g++ "$@"')  # the same compiler as far as its name and version say
    ran = tree.run(LOAD, CXX=fast, NANSCAN_BUILD_TIMEOUT="10")
    assert ran.code == 0, ran.err
    assert Path(ran.out.strip()).parent == work.parent
    assert not work.exists()
