"""The case study runs from the first step to the table, and its diagnosis finds both faults."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "segmentation"
GUARDED = ("loop", "norm", "nanscan", "recovery")


def run(script: str, *options: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent.parent)}
    command = [sys.executable, str(FOLDER / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one short comparison has written its results."""
    out = tmp_path_factory.mktemp("segmentation")
    run("compare.py", "--quick", "--out", str(out))
    return out


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, dict[str, Any]]:
    return {each["run"]: each for each in json.loads((folder / "results.json").read_text())["runs"]}


def test_plain_run_dies_and_its_model_can_not_be_saved(runs: dict[str, dict[str, Any]]) -> None:
    plain = runs["plain"]
    assert not plain["finite"] and plain["died"] == 0
    assert plain["saves"] == 2 and plain["saved"] == 0 and plain["checkpoint"] != "good"
    assert all("pickle" in error for error in plain["save_errors"]) and plain["save_errors"]


@pytest.mark.parametrize("name", GUARDED)
def test_each_cure_skips_the_same_batches_and_saves_finite_weights(runs: dict[str, dict[str, Any]], name: str) -> None:
    run = runs[name]
    assert run["finite"] and run["died"] is None and run["steps"] == 20
    assert run["skipped"] == runs["loop"]["skipped"] >= 1
    assert run["saved"] == run["saves"] == 2 and run["checkpoint"] == "good"


@pytest.mark.parametrize("name", ["mended, plain", "mended, nanscan"])
def test_mended_loss_and_model_need_no_cure(runs: dict[str, dict[str, Any]], name: str) -> None:
    run = runs[name]
    assert run["finite"] and run["skipped"] == 0
    assert run["saved"] == run["saves"] == 2 and run["checkpoint"] == "good"


def test_table_and_plots_show_every_run_and_recipe(folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    table = (folder / "table.md").read_text()
    assert re.search(r"\| plain \| 0 of 1 \| 1 \| 0 \| 0 \| 0 of 2 \|", table)
    assert [name for name in runs if f"\n| {name} | " not in table] == []
    assert all(table.count(f"\n| {name} | ") == 3 for name in GUARDED)  # runs, cost, lines
    for plot in ("case_study_runs.svg", "case_study_norms.svg"):
        assert "<svg" in (folder / plot).read_text()


def test_a_comparison_that_was_interrupted_trains_only_what_is_missing(folder: Path) -> None:
    kept = (folder / "loop-seed0" / "diary.jsonl").stat().st_mtime_ns
    lost = folder / "nanscan-seed0" / "diary.jsonl"
    lost.write_text("\n".join(lost.read_text().splitlines()[:-1]))  # killed before its end
    run("compare.py", "--quick", "--out", str(folder), "--jobs", "1")
    assert '"kind": "end"' in lost.read_text()
    assert (folder / "loop-seed0" / "diary.jsonl").stat().st_mtime_ns == kept


def test_lines_are_counted_without_blank_ones_comments_and_docstrings(tmp_path: Path) -> None:
    code = '"""What."""\n\nimport os\n\ndef f():\n    """Doc\n    string."""\n    # why\n    return (\n        os)'
    (tmp_path / "some.py").write_text(code)
    code_lines = runpy.run_path(str(FOLDER / "count_lines.py"))["code_lines"]
    assert code_lines(tmp_path / "some.py") == ["import os", "def f():", "return (", "os)"]


def test_diagnosis_names_the_line_of_the_loss_the_missing_class_and_what_can_not_be_pickled() -> None:
    output = run("diagnose.py", "--epochs", "2")
    assert "1 of 40 steps was skipped" in output
    assert re.search(r"Inf made by aten\.log at .*loss\.py:\d+: return -\(dice\.log\(\) / area\)\.sum\(\)", output)
    assert "'seven': 0}" in output
    assert "\nmodel.lock: a lock" in output and "\nmodel.bottom._forward_hooks[0]: a lambda" in output
    assert re.search(r"the loss of the bad batch: \d", output) and "what can't be pickled: []" in output
