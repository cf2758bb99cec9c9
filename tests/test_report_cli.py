"""`nanscan report`: files, exit codes, JSON, and following a log that grows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanscan.cli import main
from nanscan.reporting.follow import Batch, Tail
from tests.report_logs import EVIL, skipped, step, write

COLOUR = re.compile(rb"\x1b\[(\d+;)*[39]\d[;m]")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write(tmp_path / "run.jsonl", step(0), skipped(1, "head.bias"), step(2))


def test_page_lies_beside_the_log_unless_told_otherwise(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(log)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Report: {log.with_suffix('.html')}"
    other = log.parent / "new" / "page.html"
    assert main(["report", str(log), "-o", str(other)]) == 0
    assert other.read_text().startswith("<!DOCTYPE html>") and other.stat().st_size < 5_000_000


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0", b"step,loss\n0,1.5\n", b'{"loss": 1.5}\n'])
def test_a_file_without_a_line_of_a_log_is_misuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    file = tmp_path / "other.txt"
    file.write_bytes(content)
    assert main(["report", str(file)]) == 2
    assert "is no log of steps" in capsys.readouterr().err and not file.with_suffix(".html").exists()


def test_a_run_that_did_not_say_that_it_ended_may_have_been_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = write(tmp_path / "killed.jsonl", step(0), step(1))
    ended = write(
        tmp_path / "ended.jsonl", step(0), {"kind": "end", "steps": 1, "error": None, "run_id": step(0)["run_id"]}
    )
    assert main(["report", str(killed)]) == main(["report", str(ended)]) == 0
    of_killed, of_ended = capsys.readouterr().out.split("ended.jsonl: ")
    assert "end: not in the log: still running, or killed" in of_killed and "killed" not in of_ended


def test_a_checkpoint_is_told_the_command_that_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "last.pt"
    torch.save({"weight": torch.ones(3)}, file)
    assert main(["report", str(file)]) == 2
    assert f"for a checkpoint: nanscan scan {file}" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b'{"step": 0, "no'])
def test_a_log_that_has_just_begun_opens(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "run.jsonl"
    file.write_bytes(content)
    assert main(["report", str(file)]) == 0 and file.with_suffix(".html").exists()


@pytest.mark.parametrize("content", ["not a log", "not a log\n", "\0\1", '["step", 0]', "[1,"])
def test_a_file_without_a_line_of_a_log_is_refused_whole_or_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text(content)
    assert main(["report", str(file)]) == 2 and "is no log of steps" in capsys.readouterr().err
    assert not file.with_suffix(".html").exists()


@pytest.mark.parametrize("command", ["report", "pickle"])
def test_a_named_pipe_is_refused_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main([command, str(tmp_path / "pipe")]) == 2
    assert "not a regular file" in capsys.readouterr().err


def test_open_shows_the_page_in_the_browser(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    assert main(["report", str(log), "--open"]) == 0
    assert shown == [log.with_suffix(".html").as_uri()]


def test_json_is_the_summary_and_bad_runs_exit_0_too(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(log, *[skipped(n, "head.bias", norm="NaN") for n in range(5)])
    assert main(["report", str(log), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["exit_code"] == 0 and about["page"] is None
    assert about["verdict"] == "5 of 5 steps were skipped; it ended with 5 skipped in a row."
    assert about["offenders"] == [{"name": "head.bias", "steps": 5, "first_step": 0, "last_step": 4}]
    assert not log.with_suffix(".html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "'nowhere.jsonl' is not there: give the path that nanscan.wrap(..., log=...) was given"),
        (["."], "'.' is a folder: give a log, such as run.jsonl"),
        (["run.jsonl", "-o", "run.jsonl"], "'run.jsonl' is the log itself: choose another file with -o"),
        (["run.jsonl", "-o", "."], "'.' is a folder: give a file, such as report.html"),
        (
            ["run.jsonl", "--follow", "--json"],
            "--follow prints lines until it is stopped: leave out --json, --open and -o",
        ),
    ],
)
def test_misuse_is_exit_code_2_and_says_what_to_do(
    arguments: list[str], message: str, log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(log.parent)
    before = log.read_bytes()
    assert main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert log.read_bytes() == before


def test_half_a_surrogate_pair_in_a_name_does_not_stop_the_page(log: Path) -> None:
    write(log, skipped(0, "w\ud800"))
    assert main(["report", str(log)]) == 0


def test_follow_prints_plain_lines_in_a_pipe_as_the_log_grows(log: Path) -> None:
    write(log, *[step(n) for n in range(3)])
    command = [sys.executable, "-m", "nanscan", "report", "--follow", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        with log.open("a") as file:
            file.write(json.dumps(skipped(3, f"\x1b[2J{EVIL}")) + "\n" + json.dumps(step(4))[:30])
        second = child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) == 130
    assert first == "step 2  norm 1.5  loss 2  clipped x0.5  15 steps/s  none skipped\n"
    assert "1 skipped so far  ! step 3 skipped" in second and "\\x1b[2J" in second and "\x1b" not in first + second


def test_follow_of_a_finished_log_says_that_it_waits(log: Path) -> None:
    write(log, step(0), {"kind": "end", "run_id": "a1", "steps": 1, "error": None})
    command = [sys.executable, "-m", "nanscan", "report", "--follow", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(3)]
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) == 130
    assert said[1:] == [
        "ended after 1 step\n",
        "that run is over: waiting for the log to be continued (Ctrl-C ends)\n",
    ]


def test_line_that_is_written_in_pieces_is_read_once_it_is_whole(log: Path) -> None:
    content = log.read_bytes()
    log.write_bytes(b"")
    tail, read = Tail(log), Batch()
    for at in range(0, len(content), 100):
        with log.open("ab") as file:
            file.write(content[at : at + 100])
        read += tail.read()
    assert (read.steps, read.skipped, read.last) == (3, 1, 2)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_follow_in_a_terminal_honours_no_color(log: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "nanscan", "report", "--follow", str(log)]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as child:
        text, until = b"", time.monotonic() + 60
        while b"1 skipped" not in text and time.monotonic() < until:
            text += os.read(ours, 4096)
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) == 130
    os.close(theirs)
    os.close(ours)
    assert b"step 2  norm 1.5" in text and not COLOUR.search(text)


def test_follow_waits_for_the_log_tells_what_happens_and_ends_with_the_run(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "nanscan", "report", "--follow", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stderr.readline() == f"waiting for {log}\n"
        write(log, step(0), step(1))
        said = [child.stdout.readline()]
        new = write(tmp_path / "new", step(0), *[{**note, "run_id": "a1"} for note in NOTES])
        new.replace(log)
        said += child.stdout.read().splitlines()
        assert child.wait(timeout=60) == 0
    assert said[0].startswith("step 1  norm 1.5")
    assert said[1:5] == [
        "the file was replaced or emptied: it is read from its beginning",
        "checkpoint of step 5 saved in 0.25 s: c/5.pt",
        "! checkpoint of step 6 refused: a NaN in it",
        "! rolled back to step 5: 3 bad steps in a row",
    ]
    assert said[5].startswith("step 0  norm 1.5") and said[6] == "! ended after 7 steps: TrainingDiverged: 20 skips"


NOTES = [
    {"kind": "checkpoint", "step": 5, "path": "c/5.pt", "seconds": 0.25},
    {"kind": "checkpoint", "step": 6, "path": "c/6.pt", "error": "a NaN in it", "refused": True},
    {"kind": "rollback", "step": 7, "to_step": 5, "reason": "3 bad steps in a row; the last: w"},
    {"kind": "end", "steps": 7, "error": "TrainingDiverged: 20 skips"},
]
