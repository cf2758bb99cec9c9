"""``benchmarks/gpu_check.py`` without a card, and its dealings with sections that fail, crash or hang."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.gpu.probes import Probe, probes
from benchmarks.gpu.sections import SECTIONS
from nanscan import engine

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu_check.py"
CARD = {"name": "NVIDIA Test-Card 80GB", "torch": "x", "cuda": "13.0", "driver": "1"}
no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card: nothing to degrade from")


@pytest.fixture
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120)


@no_card
def test_without_a_card_it_says_what_was_not_run_and_exits_0(tmp_path: Path) -> None:
    done = run("--output", str(tmp_path / "results"))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"No GPU check was made: torch {torch.__version__} is built ")
    assert lines[1] == "Not run:"
    assert [line.split()[0] for line in lines[2 : 2 + len(SECTIONS)]] == list(SECTIONS)
    assert lines[-1].startswith("Nothing was written.")
    assert not (tmp_path / "results").exists()


@no_card
def test_without_a_card_require_exits_1() -> None:
    done = run("--require", "--sections", "graph,step")
    assert done.returncode == 1
    assert "--require was given: this is an error." in done.stdout
    assert "sanitizer" not in done.stdout


def test_an_unknown_section_is_misuse() -> None:
    done = run("--sections", "graph,warp")
    assert done.returncode == 2
    assert done.stderr == f"there is no section 'warp': use some of {','.join(SECTIONS)}\n"


@no_card
def test_a_failing_section_does_not_stop_the_next_and_results_name_the_card(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sections need a card and fail here, each by its own exception; both are written down."""
    assert check._with_card(CARD, ["graph", "bandwidth"], tmp_path, 300.0) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "NVIDIA_Test_Card_80GB.json",
        "NVIDIA_Test_Card_80GB.txt",
    ]
    result = json.loads((tmp_path / "NVIDIA_Test_Card_80GB.json").read_text())
    assert [section["ok"] for section in result["sections"].values()] == [False, False]
    for name in ("graph", "bandwidth"):
        assert "CUDA" in result["sections"][name]["lines"][0]
    text = (tmp_path / "NVIDIA_Test_Card_80GB.txt").read_text()
    assert "graph: DOES NOT HOLD" in text and "bandwidth: DOES NOT HOLD" in text
    assert "0 of 2 sections hold" in capsys.readouterr().out


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_has_its_function(name: str) -> None:
    module, function = SECTIONS[name].function.split(":")
    assert callable(getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function))


def test_a_section_whose_time_is_used_up_is_not_run(check: ModuleType) -> None:
    result = check._run("graph", left=1.0)
    assert result["ok"] is False
    assert result["lines"] == ["FAILED not run: the time for all sections was used up"]


def test_a_hanging_command_ends_with_everything_it_started(check: ModuleType) -> None:
    inner = "import time; time.sleep(60)"
    outer = f"import subprocess, sys; print('here', flush=True); subprocess.run([sys.executable, '-c', {inner!r}])"
    start = time.monotonic()
    code, output = check.run_limited([sys.executable, "-c", outer], 2.0)
    assert (code, output) == (None, "here")
    assert time.monotonic() - start < 20.0  # it would wait for the inner one, which holds the pipe


def test_a_crash_is_reported_with_its_exit_code(check: ModuleType) -> None:
    crash = "import os; print('dying', flush=True); os.abort()"
    assert check.run_limited([sys.executable, "-c", crash], 60.0) == (-6, "dying")


def test_the_probes_find_every_planted_value_with_the_cpu_engine() -> None:
    names = []
    for probe in probes("cpu", small=True):
        assert probe.wrong(engine.scan(probe.tensors)) == "", probe.name
        names.append(probe.name)
    assert len(names) == 16


def test_a_probe_notices_a_wrong_answer() -> None:
    tensors = [torch.ones(5), torch.ones(5)]
    tensors[1][3] = float("nan")
    result = engine.scan(tensors)
    assert Probe("right", tensors, nan_at=(1, 3)).wrong(result) == ""
    assert Probe("place", tensors, nan_at=(1, 4)).wrong(result) == "bad rows {1: 3}, expected {1: 4}"
    assert Probe("count", tensors).wrong(result) == "1 NaN and 0 Inf found, 0 and 0 are there"
    other = [torch.ones(5), tensors[1] * 2]
    assert Probe("norm", other, nan_at=(1, 3)).wrong(result).startswith("finite_norm 3.0, float64 says 4.5825")


def test_the_section_on_ranks_holds_on_the_host_and_says_what_it_leaves_open() -> None:
    code = "from benchmarks.gpu.ranks import ranks; s = ranks('cpu', 'gloo'); print(s.ok, *s.lines, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPT.parents[1], capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "True", done.stdout + done.stderr
    assert lines[-1].strip() == "one card, a group of one rank: runs on several cards are untested"
