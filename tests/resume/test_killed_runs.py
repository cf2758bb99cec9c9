"""A run that is killed again and again ends with the weights and losses of one that nobody disturbed, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nanscan
from tests.manager_runs import leftovers
from tests.resume.forks import Warm

KILLS = 50


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm("from pathlib import Path\nfrom tests.resume.train_digits import build, train\nbuild()") as server:
        yield server


def launch(warm: Warm, folder: Path, background: bool) -> Any:
    return warm.fork(f"train(Path({str(folder)!r}), {background})")


def result_of(folder: Path) -> dict[str, Any]:
    loaded = nanscan.load(folder / "final.pt")
    assert isinstance(loaded, dict)
    return loaded


def assert_identical(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got["losses"] == wanted["losses"]
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted if name != "losses")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_killed_at_50_random_moments_ends_bit_identical(warm: Warm, tmp_path: Path) -> None:
    began = time.monotonic()
    child = launch(warm, tmp_path / "whole", True)
    assert child.wait() == 0, child.errors()
    whole = time.monotonic() - began
    wanted = result_of(tmp_path / "whole")
    assert wanted["losses"][-1] < 0.5 < wanted["losses"][0]
    again = launch(warm, tmp_path / "again", False)
    assert again.wait() == 0
    assert_identical(result_of(tmp_path / "again"), wanted)  # it repeats at all, and the mode makes no difference

    moments = random.Random(5)
    killed, background = 0, True
    folder = tmp_path / "killed"
    while killed < KILLS or not (folder / "final.pt").exists():
        if (folder / "final.pt").exists():
            assert_identical(result_of(folder), wanted)
            background = not background
            shutil.rmtree(folder)
        child = launch(warm, folder, background)
        if killed < KILLS:
            time.sleep(moments.uniform(0, whole / 3))
            child.kill(signal.SIGKILL)
        status = child.wait()
        assert status in (0, -signal.SIGKILL), child.errors()
        killed += status == -signal.SIGKILL
    assert_identical(result_of(folder), wanted)
    assert leftovers(folder) == []
