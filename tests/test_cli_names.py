"""File names made to harm the reader of a terminal, or to trip a program up, are shown escaped and do nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.cli_server import Server
from tests.report_logs import skipped, step, write

NAN = float("nan")
NAMES = {
    b"two\nlines": "two\\nlines",
    b"red\x1b[31mcolour\x1b[2J": "red\\x1b[31mcolour\\x1b[2J",
    b"latin-\xe9\xff": "latin-\\udce9\\udcff",
    b"[red]markup :warning:": "[red]markup :warning:",
    b"-dash": "-dash",
    "left\u202etxt.".encode(): "left\\u202etxt.",
    b"w" * 240: "w" * 240,
}


@pytest.mark.parametrize("name", list(NAMES), ids=lambda name: repr(name[:12]))
def test_hostile_file_names_are_shown_escaped_and_given_whole_as_json(
    name: bytes,
    tmp_path: Path,
    server: Server,
) -> None:
    shown, folder = NAMES[name], tmp_path
    torch.save({"w": torch.tensor([NAN])}, folder / "plain.pt")
    path = os.path.join(os.fsencode(folder), name)
    os.rename(folder / "plain.pt", os.fsdecode(path) + ".pt")
    given = os.fsdecode(name) + ".pt"
    log = write(folder / "plain.jsonl", step(0), skipped(1, "w"))
    os.rename(log, os.fsdecode(path) + ".jsonl")

    done = server.run(folder, "scan", "--", given)
    assert (done.code, done.err) == (1, "") and done.out.startswith(f"{shown}.pt: 1 NaN, ")
    assert done.out.count("\n") == 3 and "\x1b" not in done.out
    document = json.loads(server.run(folder, "scan", "--json", "--", given).out)
    assert document["files"][0]["path"] == given

    done = server.run(folder, "pickle", "--", given)
    assert done.code == 0 and done.out.startswith(f"{shown}.pt: torch zip archive")

    done = server.run(folder, "report", "--", os.fsdecode(name) + ".jsonl")
    assert (done.code, done.err) == (0, "") and done.out.splitlines()[-1] == f"Report: {shown}.html"
    assert done.out.startswith(f"{shown}.jsonl: ") and (folder / (os.fsdecode(name) + ".html")).exists()

    for verb in ("scan", "pickle", "report"):
        done = server.run(folder, verb, "--", f"{given}.gone")
        assert (done.code, done.out) == (2, "") and f"{shown}.pt.gone" in done.err
        assert done.err.count("\n") == 1 and "\x1b" not in done.err


def test_a_name_that_looks_like_an_option_is_answered_with_the_way_out(tmp_path: Path, server: Server) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "-x.pt")
    done = server.run(tmp_path, "scan", "-x.pt")
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("The file of that name is ./-x.pt here. See: nanscan scan --help\n")
    assert server.run(tmp_path, "scan", "./-x.pt").code == 0


def test_a_stream_that_knows_ascii_only_gets_what_stands_for_the_rest(tmp_path: Path, server: Server) -> None:
    torch.save({"重み": torch.tensor([NAN])}, tmp_path / "é.pt")
    done = server.run(tmp_path, "scan", "é.pt", PYTHONIOENCODING="ascii")
    assert (done.code, done.err) == (1, "") and done.out.startswith("\\xe9.pt: 1 NaN")
    assert "\\u91cd\\u307f" in done.out
    bench = server.run(tmp_path, "bench", "--row", "mlp", "--seconds", "0.1", "--no-steps", PYTHONIOENCODING="ascii")
    assert bench.code == 0 and "loop / ours" in bench.out and " us" in bench.out and "\\x" not in bench.out


def test_a_terminal_is_not_steered_by_a_name_either(tmp_path: Path, server: Server) -> None:
    torch.save({"w\x1b[2J[bold]": torch.tensor([NAN])}, tmp_path / "a\x1b]0;title\x07[red].pt")
    done = server.terminal(tmp_path, "scan", "a\x1b]0;title\x07[red].pt", columns=200)
    assert "\x1b[2J" not in done.out and "\x1b]0" not in done.out
    assert "a\\x1b]0;title\\x07[red].pt: 1 NaN" in done.out and "w\\x1b[2J[bold]" in done.out
