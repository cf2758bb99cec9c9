"""What a terminal shows: tables of any width, progress on stderr only, no colour where none is wanted, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from nanscan.tables import fact_lines, table_lines
from tests.cli_server import COLOUR, CONTROL, Done, Server
from tests.report_logs import step, write_long

LONG = "encoder.layers.11.self_attention.in_projection.weight"
NAN = float("nan")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bad checkpoint with a long name in it."""
    torch.save({LONG: torch.tensor([[3.0, 4.0], [NAN, float("inf")]]), "b": torch.ones(2)}, tmp_path / "nan.pt")
    return tmp_path


def zeros(path: Path, count: int) -> None:
    """A checkpoint of so many float32 zeros, which take no space on the disk."""
    np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(count,))


def drawn(done: Done) -> str:
    """All that was ever on the screen."""
    return CONTROL.sub("", done.out + done.err)


def test_a_pipe_gets_aligned_columns_whole_names_and_no_colour(folder: Path, server: Server) -> None:
    for others in ({}, {"COLUMNS": "40"}, {"TERM": "dumb"}, {"PYTHONIOENCODING": "ascii"}):
        done = server.run(folder, "scan", "--all", "nan.pt", **others)
        lines = done.out.splitlines()
        assert "\x1b" not in done.out and done.out.isascii() and done.err == ""
        head, bad, good = lines[1:]
        assert bad.startswith(f"  {LONG}  [2, 2]") and good.startswith("  b  ")
        assert head.index("shape") == bad.index("[2, 2]") == good.index("[2]")
        end = head.index("nan_count") + len("nan_count")
        assert bad[:end].endswith(" 1") and good[:end].endswith(" 0")  # figures to the right


def test_a_terminal_of_60_columns_cuts_nothing(folder: Path, server: Server) -> None:
    done = server.terminal(folder, "scan", "nan.pt", columns=60)
    at = done.shown.index(f"  {LONG}")
    assert done.shown[at + 1] == "    shape [2, 2]  dtype float32  nan_count 1  inf_count 1"
    assert done.shown[at + 2] == "    first_bad [1, 0]  finite_norm 5  inf_norm 4"
    assert done.code == 1 and COLOUR.search(done.out)
    facts = server.terminal(folder, "env", columns=60).shown
    assert any(line.startswith("packages ") for line in facts)
    unbroken = [line for line in facts if len(line) > 60 and " " in line.strip()]
    assert unbroken == []
    assert "filelock" in " ".join(facts) and "click" in " ".join(facts)


def test_a_wide_terminal_gets_the_table(folder: Path, server: Server) -> None:
    shown = server.terminal(folder, "pickle", "nan.pt", columns=140).shown
    head = next(line for line in shown if line.startswith("  global"))
    rows = [line for line in shown if line.startswith("  torch.") and "allowed by weights_only" in line]
    assert head.split("  ")[1] == "global" and len(rows) == 2


@pytest.mark.parametrize("others", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_color_and_dumb_terminals_get_no_colour(
    folder: Path,
    server: Server,
    others: dict[str, str],
) -> None:
    done = server.terminal(folder, "scan", "nan.pt", columns=120, **others)
    assert done.code == 1 and LONG in done.out and not COLOUR.search(done.out)
    if "TERM" in others:
        assert "\x1b" not in done.out and "importing" not in done.out  # it can't move its cursor: no progress


def test_tables_are_aligned_by_what_is_seen_and_pad_no_row_beyond_reason() -> None:
    lines = [line.plain for line in table_lines(["name", "n"], [["重み", "1"], ["w" * 5000, "2"], ["b", "3"]])]
    assert lines[1] == "  重み" + " " * 56 + "  1" and len(lines[3]) == 65  # two columns for each sign
    assert lines[2] == "  " + "w" * 5000 + "  2"
    narrow = [line.plain for line in fact_lines({"cache": "in a folder of a long name"}, limit=20)]
    assert narrow == ["cache", "  in a folder of a", "  long name"]
    assert [line.plain for line in fact_lines({"cache": "in a"}, limit=1)] == ["cache", "  in", "  a"]


def test_progress_is_drawn_on_stderr_while_stdout_gets_the_results(tmp_path: Path, server: Server) -> None:
    zeros(tmp_path / "large.npy", 1 << 26)
    done = server.terminal(tmp_path, "scan", "large.npy", piped=True, columns=100)
    assert done.code == 0 and done.out.startswith("large.npy: all finite (npy, 1 tensor, 67,108,864 elements")
    assert "large.npy" in done.err and "/268.4 MB" in CONTROL.sub("", done.err)
    assert done.out.count("\n") == 1 and "importing" not in done.out


def test_a_command_that_ended_before_anybody_asked_is_not_waited_for(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.run(tmp_path, "--version").code == 0
    patient, begun = server._answer, time.monotonic()
    monkeypatch.setattr(server, "_answer", lambda: (time.sleep(1), patient())[1])
    assert server.terminal(tmp_path, "--version").shown[0].startswith("nanscan ")
    assert time.monotonic() - begun < 60  # it would be until patience ends


def test_a_command_that_does_not_end_is_noticed_and_the_next_one_is_answered(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.run(tmp_path, "--version").code == 0
    with monkeypatch.context() as hasty:
        hasty.setattr("tests.cli_server.PATIENCE", 2.0)
        for start in (server.run, server.terminal):
            with pytest.raises(AssertionError, match="has not ended"):
                start(tmp_path, "report", "--follow", "not-yet.jsonl")
    assert server.run(tmp_path, "--version").code == 0


def stopped(done: Done) -> None:
    """Ended by Ctrl-C as it should."""
    assert done.code == 130
    assert [line for line in drawn(done).splitlines() if line.endswith("nanscan: stopped")] != []
    assert "Traceback" not in drawn(done) and "Exception" not in drawn(done)
    assert done.out.rfind("\x1b[?25l") <= done.out.rfind("\x1b[?25h")  # the cursor is back


def test_ctrl_c_stops_a_scan(tmp_path: Path, server: Server) -> None:
    zeros(tmp_path / "large.npy", 1 << 30)
    stopped(server.terminal(tmp_path, "scan", "large.npy", stop_at="/4.3 GB"))


def test_ctrl_c_stops_a_look_at_an_object_that_turns_it_into_an_error(tmp_path: Path, server: Server) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "try:\n    print('here', flush=True); time.sleep(100)\n"
        "except BaseException as error:\n    raise ImportError('half a library') from error\n"
    )
    stopped(server.terminal(tmp_path, "pickle", "slow:model", stop_at="here"))


def test_ctrl_c_stops_bench(tmp_path: Path, server: Server) -> None:
    stopped(server.terminal(tmp_path, "bench", "--seconds", "60", "--row", "mlp", stop_at="measuring: scan"))


def test_ctrl_c_stops_the_demo_and_its_log_holds_whole_lines(tmp_path: Path, server: Server) -> None:
    done = server.terminal(tmp_path, "demo", "--epochs", "6", stop_at="guarded by nanscan")
    stopped(done)
    assert [path.name for path in tmp_path.iterdir()] == ["nanscan-demo.jsonl"]
    lines = (tmp_path / "nanscan-demo.jsonl").read_text().splitlines()
    assert all(json.loads(line)["run_id"] for line in lines)


def test_ctrl_c_leaves_the_page_that_was_there_and_nothing_beside_it(tmp_path: Path, server: Server) -> None:
    write_long(tmp_path / "run.jsonl", 60_000, frozenset())
    (tmp_path / "run.html").write_text("the page of yesterday")
    stopped(server.terminal(tmp_path, "report", "run.jsonl", stop_at="writing run.html"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.jsonl"]
    assert (tmp_path / "run.html").read_text() == "the page of yesterday"


def test_ctrl_c_stops_following_a_log(tmp_path: Path, server: Server) -> None:
    (tmp_path / "run.jsonl").write_text(json.dumps(step(0)) + "\n")
    stopped(server.terminal(tmp_path, "report", "--follow", "run.jsonl", stop_at="step 0"))


def test_ctrl_c_while_pytorch_is_imported_is_one_line_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanscan", "env", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=_listen, **pipes) as process:  # type: ignore[call-overload]
        until = time.monotonic() + 60
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text() and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "nanscan: stopped\n"
    assert json.loads(out) == {"error": "stopped", "exit_code": 130}


def test_a_thread_that_an_imported_module_started_does_not_keep_the_command(tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\nmodel = {'lr': 0.1}\n"
    )
    command = [sys.executable, "-m", "nanscan", "pickle", "threads:model", "--no-loading"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "threads:model: it pickles and loads\n", "")


def test_ctrl_c_while_a_text_is_executed_ends_cleanly_too(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(
        "import sys, nanscan.cli.process as process\n"
        "def interrupted(*args, **kwargs): exec('raise KeyboardInterrupt')\n"
        "process._invoke = interrupted\n"
        "sys.exit(process.run(['env']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr.strip()) == (130, "nanscan: stopped")


def test_ctrl_c_when_the_answer_is_given_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import os, signal, sys, nanscan.cli.process as process\n"
        "def pressed(self): os.kill(os.getpid(), signal.SIGINT)\n"
        "process._Interrupts.remove = pressed\n"
        "sys.argv[1:] = ['completion', 'bash']\n"
        "sys.exit(process.run(None))\n"
    )
    command = [sys.executable, str(tmp_path / "late.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=_listen)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "") and "_NANSCAN_COMPLETE" in done.stdout


def _listen() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it
