"""A thread that writes a checkpoint pauses now and then, so that training goes on beside it."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import nanscan
from nanscan.checkpoint import turns


def test_only_another_thread_than_the_main_one_pauses_and_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[str] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: pauses.append(threading.current_thread().name))
    monkeypatch.setattr(turns, "_latest", 0.0)
    for _ in range(10):
        turns.give_way()
    assert pauses == []

    def write() -> None:
        start = time.monotonic()
        while time.monotonic() - start < 0.1:
            turns.give_way()

    thread = threading.Thread(target=write, name="writer")
    thread.start()
    thread.join()
    assert set(pauses) == {"writer"}
    assert 2 <= len(pauses) <= 51


def test_saving_many_small_tensors_gives_way_at_each_of_its_stages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places: set[str] = set()

    def note() -> None:
        places.add(Path(sys._getframe(1).f_code.co_filename).stem)

    for stage in ("tensors", "picklable", "writer", "digest"):
        monkeypatch.setattr(f"nanscan.checkpoint.{stage}.give_way", note)
    nanscan.save({str(i): torch.ones(4) for i in range(10)}, tmp_path / "small.pt")
    assert places == {"tensors", "picklable", "writer", "digest"}
