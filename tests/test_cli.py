"""The command line: help, exit codes, one-line errors, JSON, streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import nanscan
from nanscan.bench import DTYPES, WORKLOADS
from nanscan.cli import bench, main
from nanscan.cli.app import app
from nanscan.cli.output import print_json
from nanscan.errors import EngineError
from tests.cli_server import COLOUR, Server
from tests.report_logs import skipped, step, write

VERBS = ("demo", "scan", "pickle", "report", "bench", "env", "completion", "help")
Capture = pytest.CaptureFixture[str]
NAN = float("nan")


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Adds a verb `boom` that raises what the test puts into the returned list."""
    errors: list[BaseException] = []

    @click.command("boom")
    @click.option("--json", "as_json", is_flag=True)
    @click.option("--debug", is_flag=True)
    def boom(as_json: bool, debug: bool) -> None:
        raise errors[0]

    monkeypatch.setitem(app.commands, "boom", boom)
    return errors


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a clean and a bad checkpoint, a pickle that is refused, and a log."""
    torch.save({"w": torch.ones(2)}, tmp_path / "good.pt")
    torch.save({"w": torch.tensor([1.0, NAN])}, tmp_path / "nan.pt")
    (tmp_path / "attack.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    write(tmp_path / "run.jsonl", step(0), skipped(1, "head.bias"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["", *VERBS])
def test_help_fits_a_screen_of_80_by_24_and_ends_with_examples_and_exit_codes(
    name: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 23  # and the prompt
    assert max(map(len, text.splitlines())) <= 80
    assert "Exit code: 0" in text and "docs/command_line.md" in text and "--debug" in text
    if name:
        assert f"Examples:\n  nanscan {name}" in text.replace('eval "$(', "") and "--json" in text
        assert main(["help", name]) == 0
        assert capsys.readouterr().out == text


def test_help_names_every_verb_and_every_verb_is_tested_here(capsys: Capture) -> None:
    assert main(["help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [name for name in VERBS if not any(line.startswith(f"  {name} ") for line in lines)] == []
    assert list(app.commands) == list(VERBS)


def test_no_verb_shows_help_and_is_misuse(capsys: Capture) -> None:
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "No such command 'dmeo'. Did you mean 'demo'? See: nanscan --help"),
        (["help", "scna"], "No such command 'scna'. Did you mean 'scan'?"),
        (["xyzzy"], "There are demo, scan, pickle, report, bench, env, completion, help."),
        (["completion", "tcsh"], "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        (
            ["demo", "--epochs", "0"],
            "Invalid value for '--epochs': 0 is not in the range x>=1. See: nanscan demo --help",
        ),
        (["demo", "--epoch-count", "3"], "No such option '--epoch-count'"),
        (["bench", "--row", "vgg"], "'vgg' is not one of 'small', 'lora', 'mlp', 'resnet50', 'bert', 'gpt2'"),
        (["bench", "--dtype", "int8"], "'int8' is not one of 'float32', 'bfloat16', 'float16'"),
        (["scan"], "Missing argument 'FILE...'. See: nanscan scan --help"),
        (["scan", "--nan", "x.pt"], "No such option '--nan'"),
        (["scan", "gone.pt"], "gone.pt: cannot be scanned: No such file or directory"),
        (["pickle"], "Missing argument 'FILE|MODULE:OBJECT'"),
        (["pickle", "gone.pt"], "'gone.pt' is not there: give a file, or an object as package.module:object"),
        (["pickle", ""], "Invalid value for 'FILE|MODULE:OBJECT': an empty name."),
        (["report", "gone.jsonl"], "'gone.jsonl' is not there"),
        (["report", "/dev/null"], "'/dev/null' is a device, not a regular file: give a log"),
        (["pickle", "/dev/zero"], "'/dev/zero' is a device, not a regular file: give a file"),
        (["report", "attack.pkl"], "'attack.pkl' is no log of steps: not one line of it is"),
        (["report", "attack.pkl", "--follow"], "'attack.pkl' is no log of steps: not one line of it is"),
        (["report", "run.jsonl", "-o", ""], "Invalid value for '-o' / '--output': an empty name."),
        (["report", "run.jsonl", "--follow", "--open"], "leave out --json, --open and -o"),
        (["demo", "--log", "run.html"], "the page goes to 'run.html': choose another name, such as run.jsonl"),
        (["demo", "--log", "/dev/full"], "'/dev/full' is no file: give one, such as run.jsonl"),
        (["demo", "--seed", str(2**64)], "is not in the range"),
        (["bench", "--seconds", "nan"], "nan is no time that ends."),
        (["bench", "--seconds", "inf"], "inf is no time that ends."),
        (["env", "now"], "Got unexpected extra argument (now)"),
    ],
)
def test_misuse_is_one_line_on_stderr_and_exit_code_2(
    arguments: list[str], message: str, files: Path, capsys: Capture
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("nanscan: ")
    assert message in captured.err
    assert main([*arguments, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 2 and document["error"]


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("scan good.pt", 0),
        ("scan good.pt nan.pt", 1),
        ("pickle good.pt", 0),
        ("pickle attack.pkl", 1),
        ("report run.jsonl", 0),
        ("bench --row mlp --seconds 0.1 --no-steps", 0),
        ("env", 0),
        ("completion bash", 0),
        ("help scan", 0),
    ],
)
def test_exit_codes_0_and_1_and_json_is_all_that_stdout_gets(
    command: str,
    code: int,
    files: Path,
    server: Server,
) -> None:
    text = server.run(files, *command.split())
    assert (text.code, text.err) == (code, "") and text.out
    done = server.run(files, *command.split(), "--json")
    assert (done.code, done.err) == (code, "")
    assert json.loads(done.out)["exit_code"] == code


@pytest.mark.parametrize("command", ["scan nan.pt", "pickle good.pt", "report run.jsonl", "env", "help scan", "scan"])
def test_json_before_the_verb_holds_for_the_verb(command: str, files: Path, capsys: Capture) -> None:
    codes = main(["--json", *command.split()]), main([*command.split(), "--json"])
    before, behind = capsys.readouterr().out.split("\n}\n{\n")
    assert codes[0] == codes[1] and before + "\n}\n" == "{\n" + behind


def test_a_page_that_is_to_be_opened_is_written_with_json_too(
    files: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda url: False)  # as where there is none
    assert main(["report", "run.jsonl", "--open", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["page"] == "run.html" and (files / "run.html").exists()
    assert err == "nanscan: no browser could be started: open run.html yourself\n"


def test_a_demo_that_does_not_end_well_is_exit_code_1_and_says_nothing_on_stderr(
    tmp_path: Path,
    server: Server,
) -> None:
    done = server.run(tmp_path, "demo", "--epochs", "1", "--rounds", "1", "--json")
    document = json.loads(done.out)
    assert (done.code, document["exit_code"], done.err) == (1, 1, "") and document["guarded"]["accuracy"] <= 0.9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nanscan-demo.html", "nanscan-demo.jsonl"]


def test_an_engine_that_is_insisted_on_and_can_not_be_had_is_exit_code_1(
    tmp_path: Path,
    server: Server,
) -> None:
    done = server.run(tmp_path, "env", "--json", NANSCAN_CUDA="1")
    document = json.loads(done.out)
    assert done.code == document["exit_code"] == (1 if document["engine"]["cuda"] == "failed" else 0)


def test_log_in_a_folder_that_cannot_be_made_is_misuse(tmp_path: Path, server: Server) -> None:
    (tmp_path / "file").write_text("")
    done = server.run(tmp_path, "demo", "--log", "file/run.jsonl")
    assert done.code == 2 and "check the path" in done.err


def test_foreseen_error_keeps_its_own_fix(verb: list[BaseException], capsys: Capture) -> None:
    verb.append(EngineError("no compiler.\nInstall one, or set NANSCAN_ENGINE=eager."))
    assert main(["boom"]) == 2
    assert capsys.readouterr().err == "nanscan: no compiler. Install one, or set NANSCAN_ENGINE=eager.\n"


def test_defect_is_one_line_that_asks_for_a_report(verb: list[BaseException], capsys: Capture) -> None:
    verb.append(RuntimeError("x\x1b[2J"))
    assert main(["boom"]) == 70
    assert capsys.readouterr().err == (
        "nanscan: internal error: RuntimeError: x\\x1b[2J; run it again with --debug for the traceback, "
        "and report it with that and `nanscan env`\n"
    )


@pytest.mark.parametrize("arguments", [["boom", "--debug"], ["--debug", "boom"], ["boom"]])
def test_debug_before_or_behind_the_verb_or_in_the_environment_shows_the_traceback(
    arguments: list[str], verb: list[BaseException], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANSCAN_DEBUG", "0" if "--debug" in arguments else "1")
    verb.append(KeyError("x"))
    assert main(arguments) == 70
    captured = capsys.readouterr().err
    assert "Traceback (most recent call last)" in captured
    assert captured.endswith("nanscan: internal error: KeyError: 'x'\n")


def test_missing_demo_extra_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--log", str(tmp_path / "run.jsonl")]) == 2
    assert capsys.readouterr().err == "nanscan: the demo needs scikit-learn: pip install 'nanscan[demo]'\n"


def test_bench_completes_the_names_that_there_are() -> None:
    assert list(bench.ROWS) == list(WORKLOADS) and list(bench.DTYPES) == list(DTYPES)


def test_help_version_and_completion_are_quick_and_import_no_torch(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text(
        "import os, sys, time\n"
        "from nanscan.cli import main\n"
        "asked = dict(_NANSCAN_COMPLETE='bash_complete', COMP_WORDS='nanscan ', COMP_CWORD='1')\n"
        "os.environ.update(asked if sys.argv[1:] == ['complete'] else {})\n"
        "code = main()\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules and 'numpy' not in sys.modules\n"
        "sys.stderr.write(f'{code} {time.process_time()}')\n"
    )
    for arguments in (["--help"], ["scan", "--help"], ["--version"], ["completion", "bash"], ["complete"]):
        command = [sys.executable, str(tmp_path / "quick.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        code, seconds = done.stderr.split()
        assert code == "0" and done.stdout, arguments
        assert float(seconds) < 0.3, arguments  # of processor time, interpreter included


def test_module_and_command_report_the_same_version() -> None:
    for command in ([sys.executable, "-m", "nanscan"], [str(Path(sys.executable).with_name("nanscan"))]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, f"nanscan {nanscan.__version__}\n")


def test_env_in_a_pipe_is_plain_text_with_what_a_bug_report_needs(tmp_path: Path, server: Server) -> None:
    done = server.run(tmp_path, "env")
    assert done.code == 0 and "\x1b" not in done.out
    for word in ("nanscan", "python", "torch", "engine", "cuda", "cache"):
        assert any(line.startswith(f"{word} ") for line in done.out.splitlines()), word


def test_env_json_says_which_engine_runs_and_why(tmp_path: Path, server: Server) -> None:
    document = json.loads(server.run(tmp_path, "env", "--json", NANSCAN_ENGINE="eager").out)
    assert document["engine"]["engine"] == "eager"
    assert "NANSCAN_ENGINE" in document["engine"]["why"]
    ours = {name: value for name, value in os.environ.items() if name.startswith("NANSCAN_")}  # of this very run
    assert document["variables"] == {**ours, "NANSCAN_ENGINE": "eager"}
    assert document["nanscan"] == nanscan.__version__


def test_a_wrong_variable_is_refused_with_the_valid_values(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANSCAN_ENGINE", "fast")
    assert main(["env"]) == 2
    assert capsys.readouterr().err == (
        "nanscan: NANSCAN_ENGINE='fast' is not known: use one of auto, native, eager, reference, or unset it.\n"
    )


def test_json_output_is_strict_about_floats(capsys: Capture) -> None:
    print_json({"norm": float("nan"), "rows": [float("-inf"), 1.5]})
    assert json.loads(capsys.readouterr().out) == {"norm": "NaN", "rows": ["-Infinity", 1.5]}


def test_warnings_are_one_line_each_on_stderr(files: Path, server: Server) -> None:
    (files / "warns.py").write_text("import warnings\nprint('noise')\nwarnings.warn('two\\nlines')\nmodel = 3\n")
    done = server.run(files, "pickle", "warns:model", "--json")
    assert json.loads(done.out)["problems"] == []
    assert sorted(done.err.splitlines()) == ["nanscan: UserWarning: two lines", "noise"]


def _shell(command: str, folder: Path) -> tuple[int, str, str]:
    command = command.replace("nanscan ", f"{sys.executable} -m nanscan ")
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, cwd=folder, errors="surrogateescape",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_reader_that_goes_away_ends_it_quietly(files: Path) -> None:
    torch.save({f"{'w' * 90}.{number}": torch.tensor([NAN]) for number in range(3000)}, files / "many.pt")
    code, out, err = _shell("nanscan scan many.pt | head -1; exit ${PIPESTATUS[0]}", files)
    assert (code, out.count("\n"), err) == (141, 1, "")


def test_streams_that_are_closed_or_full_do_no_harm(files: Path) -> None:
    assert _shell("nanscan completion fish >&-", files) == (0, "", "")
    assert _shell("nanscan report run.jsonl >&- <&-", files) == (0, "", "")
    assert (files / "run.html").read_text().startswith("<!DOCTYPE html>")
    code, _, err = _shell("nanscan completion bash > /dev/full", files)
    assert (code, err.count("\n")) == (2, 1) and "No space left on device" in err
    assert _shell("nanscan scna 2>&-", files) == (2, "", "")


def test_a_page_that_goes_to_stdout_goes_there_alone(files: Path) -> None:
    code, out, err = _shell("cat run.jsonl | nanscan report /dev/stdin", files)
    assert (code, out) == (2, "") and "say where it goes with -o" in err
    code, out, err = _shell("nanscan report run.jsonl -o /dev/stdout | cat", files)
    assert (code, err) == (0, "") and out.startswith("<!DOCTYPE html>") and out.rstrip().endswith("</html>")
    code, out, err = _shell("nanscan report run.jsonl -o /dev/stdout --json | cat; exit ${PIPESTATUS[0]}", files)
    assert code == json.loads(out)["exit_code"] == 2 and "can't both go to stdout: give -o a file" in err


def test_no_colour_is_honoured_even_where_colour_is_forced(tmp_path: Path, server: Server) -> None:
    forced = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    assert COLOUR.search(server.run(tmp_path, "env", **forced).out)  # the test can see colour where there is some
    assert not COLOUR.search(server.run(tmp_path, "env", **forced, NO_COLOR="1").out)
