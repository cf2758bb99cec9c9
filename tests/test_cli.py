"""The command line: exit codes, one-line errors, JSON, pipes and interruption."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

import nanscan
from nanscan.cli import app as cli_app
from nanscan.cli import main
from nanscan.cli.output import print_json
from nanscan.errors import EngineError

ANSI = "\x1b["
VERBS = ("demo", "env", "scan", "pickle", "report", "bench")
COLOUR = re.compile(r"\x1b\[(\d+;)*[39]\d[;m]")


def nanscan_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m nanscan …` with pipes for stdout and stderr."""
    return subprocess.run(
        [sys.executable, "-m", "nanscan", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Adds a verb `boom` that raises what the test puts into the returned list."""
    errors: list[BaseException] = []

    @click.command("boom")
    @click.option("--json", "as_json", is_flag=True)
    @click.option("--debug", is_flag=True)
    def boom(as_json: bool, debug: bool) -> None:
        raise errors[0]

    monkeypatch.setitem(cli_app.app.commands, "boom", boom)
    return errors


def test_help_fits_a_screen_and_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    for name in VERBS:
        assert any(line.strip().startswith(name + " ") for line in lines), name
    assert "Exit code: 0 clean, 1 something found, 2 misuse" in "\n".join(lines)


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_has_help_json_and_debug(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "--json" in text and "--debug" in text
    assert len(text.splitlines()) <= 40


def test_no_verb_shows_help_and_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "No such command 'dmeo'"),
        (
            ["demo", "--epochs", "0"],
            "Invalid value for '--epochs': 0 is not in the range x>=1. See: nanscan demo --help",
        ),
        (["demo", "--epoch-count", "3"], "No such option '--epoch-count'"),
        (["bench", "--row", "vgg"], "'vgg'"),
        (["scan"], "Missing argument 'FILE...'. See: nanscan scan --help"),
        (["scan", "--nan", "x.pt"], "No such option '--nan'"),
        (["scan", "gone.pt"], "gone.pt: cannot be scanned: No such file or directory"),
        (["pickle"], "Missing argument 'FILE|MODULE:OBJECT'"),
        (["pickle", "gone.pt"], "'gone.pt' is not there: give a file, or an object as package.module:object"),
        (["bench", "--dtype", "int8"], "there is no benchmark in dtype 'int8': use one of float32, bfloat16, float16."),
    ],
)
def test_misuse_is_one_line_on_stderr_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("nanscan: ")
    assert message in captured.err


def test_misuse_with_json_is_a_document_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--epochs", "none", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 2
    assert "'none' is not a valid integer range" in document["error"]


def test_log_in_a_folder_that_cannot_be_made_is_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--log", str(tmp_path / "file" / "run.jsonl")]) == 2
    assert "check the path" in capsys.readouterr().err


def test_foreseen_error_keeps_its_own_fix(verb: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    verb.append(EngineError("no compiler.\nInstall one, or set NANSCAN_ENGINE=eager."))
    assert main(["boom"]) == 2
    assert capsys.readouterr().err == "nanscan: no compiler. Install one, or set NANSCAN_ENGINE=eager.\n"


def test_defect_is_one_line_without_debug(verb: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    verb.append(KeyError("x"))
    assert main(["boom"]) == 70
    assert capsys.readouterr().err == (
        "nanscan: internal error: KeyError: 'x'; run it again with --debug for the traceback\n"
    )


def test_debug_shows_the_traceback(verb: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    verb.append(KeyError("x"))
    assert main(["boom", "--debug"]) == 70
    captured = capsys.readouterr().err
    assert "Traceback (most recent call last)" in captured
    assert captured.endswith("nanscan: internal error: KeyError: 'x'\n")


def test_every_verb_is_tested_here() -> None:
    assert sorted(cli_app.app.commands) == sorted(VERBS)


def test_missing_demo_extra_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--log", str(tmp_path / "run.jsonl")]) == 2
    assert capsys.readouterr().err == "nanscan: the demo needs scikit-learn: pip install 'nanscan[demo]'\n"


def test_ctrl_c_ends_cleanly(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "nanscan", "demo", "--epochs", "100000", "--log", str(log)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    try:
        deadline = time.monotonic() + 60
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # well into the training
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.strip() == "nanscan: stopped"
    assert output == ""


def test_ctrl_c_while_a_text_is_executed_ends_cleanly_too(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(
        "import sys, nanscan.cli.app as app\n"
        "def interrupted(*args, **kwargs): exec('raise KeyboardInterrupt')\n"
        "app.app.main = interrupted\n"
        "sys.exit(app.main(['env']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr.strip()) == (130, "nanscan: stopped")


def test_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m nanscan env | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 141)  # 0 where everything was written before `true` had ended
    assert done.stderr == ""


def test_module_and_command_report_the_same_version() -> None:
    done = nanscan_command("--version")
    assert (done.returncode, done.stdout) == (0, f"nanscan {nanscan.__version__}\n")


def test_env_in_a_pipe_is_plain_text_with_what_a_bug_report_needs() -> None:
    done = nanscan_command("env")
    assert done.returncode == 0, done.stderr
    assert ANSI not in done.stdout
    for word in ("nanscan", "python", "torch", "engine", "cuda", "cache"):
        assert word in done.stdout, word


def test_env_json_says_which_engine_runs_and_why() -> None:
    done = nanscan_command("env", "--json", NANSCAN_ENGINE="eager")
    document = json.loads(done.stdout)
    assert document["engine"]["engine"] == "eager"
    assert "NANSCAN_ENGINE" in document["engine"]["why"]
    assert document["variables"] == {"NANSCAN_ENGINE": "eager"}
    assert document["nanscan"] == nanscan.__version__


def test_env_refuses_a_wrong_variable_with_the_valid_values() -> None:
    done = nanscan_command("env", NANSCAN_ENGINE="fast")
    assert done.returncode == 2
    assert done.stderr == (
        "nanscan: NANSCAN_ENGINE='fast' is not known: use one of auto, native, eager, reference, or unset it.\n"
    )


def test_no_color_is_honoured_even_where_colour_is_forced() -> None:
    coloured = nanscan_command("env", FORCE_COLOR="1", TERM="xterm-256color")
    plain = nanscan_command("env", FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1")
    assert COLOUR.search(coloured.stdout)  # the test can see colour where there is some
    assert not COLOUR.search(plain.stdout)


def test_json_output_is_strict_about_floats(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"norm": float("nan"), "rows": [float("-inf"), 1.5]})
    assert json.loads(capsys.readouterr().out) == {"norm": "NaN", "rows": ["-Infinity", 1.5]}


def test_bench_json_holds_the_ratios_of_the_rows_asked_for() -> None:
    done = nanscan_command("bench", "--row", "mlp", "--seconds", "0.2", "--no-steps", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["row"] for row in document["scan"]] == ["mlp"]
    assert document["step"] == []
