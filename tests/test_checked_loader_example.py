"""The example leaves out the spoilt batches, names them, and learns all the same."""

from __future__ import annotations

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

import nanscan

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "checked_loader.py"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with warnings.catch_warnings():
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_three_kinds_of_bad_rows_are_named_and_the_rest_is_learnt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch)
    output = capsys.readouterr().out
    assert "has 10, allowed 0..9 (num_classes 10)" in output
    assert "images look not scaled" in output and " NaN, " in output
    found = re.search(r"skipped (\d+) of 450 batches; accuracy ([\d.]+)", output)
    assert found is not None and 10 <= int(found[1]) <= 30 and float(found[2]) > 0.85


def test_it_stops_at_the_first_bad_batch_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(nanscan.BadBatch, match="of epoch 0 is bad"):
        run(monkeypatch, "--on-bad", "raise")
