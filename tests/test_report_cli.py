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

from nanscan.cli import main
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
        (["nowhere.jsonl", "--follow"], "'nowhere.jsonl' is not there"),
        (["."], "'.' is a folder: give a log, such as run.jsonl"),
        (["run.jsonl", "-o", "run.jsonl"], "'run.jsonl' is the log itself: choose another file with -o"),
        (["run.jsonl", "-o", "."], "'.' is a folder: give a file, such as report.html"),
        (["run.jsonl", "--follow", "--json"], "--follow prints lines until it is stopped: leave out --json and -o"),
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
        assert child.wait(timeout=60) == 0
    assert first == "step 2  norm 1.5  loss 2  clipped x0.5  15 steps/s  none skipped\n"
    assert "1 skipped so far  ! step 3 skipped" in second and "\\x1b[2J" in second and "\x1b" not in first + second


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
        assert child.wait(timeout=60) == 0
    os.close(theirs)
    os.close(ours)
    assert b"step 2  norm 1.5" in text and not COLOUR.search(text)
