"""docs/command_line.md names the verbs, options and JSON fields that there are, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
import torch

from nanscan.cli.app import app
from tests.cli_server import Server
from tests.report_logs import skipped, step, write

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "command_line.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
COMMON = {"--json", "--debug", "-h", "--help"}


def first_column(section: str, heading: str) -> set[str]:
    """What is marked as code in the first column of the table with that heading."""
    table = re.search(rf"^\| {re.escape(heading)} \|.*?\n((?:\|.*\n)+)", SECTIONS[section], re.MULTILINE)
    assert table is not None, (section, heading)
    cells = [line.split("|")[1] for line in table.group(1).splitlines()[1:]]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_page_names_every_verb() -> None:
    assert set(re.findall(r"^\| \[?`nanscan (\w+)", PAGE, re.MULTILINE)) == set(app.commands)


def test_options_are_those_of_the_program() -> None:
    assert first_column("What holds for all of them", "option") == COMMON
    for name, verb in app.commands.items():
        options = {
            text
            for parameter in verb.params
            if isinstance(parameter, click.Option)
            for text in (*parameter.opts, *parameter.secondary_opts)
        }
        listed = first_column(f"nanscan {name}", "option") if options - COMMON else set()
        assert listed == options - COMMON, name


@pytest.mark.parametrize(
    ("section", "heading", "command"),
    [
        ("nanscan scan", "JSON field", "scan last.pt"),
        ("nanscan pickle", "JSON field, of a file", "pickle last.pt"),
        ("nanscan pickle", "JSON field, of an object", "pickle train:model"),
        ("nanscan report", "JSON field", "report run.jsonl"),
        ("nanscan bench", "JSON field", "bench --row mlp --seconds 0.1 --no-steps"),
        ("nanscan demo", "JSON field", "demo --epochs 1 --rounds 1"),
        ("nanscan env", "JSON field", "env"),
    ],
)
def test_json_fields_are_those_of_the_program(
    section: str,
    heading: str,
    command: str,
    tmp_path: Path,
    server: Server,
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "last.pt")
    write(tmp_path / "run.jsonl", step(0), skipped(1, "head.bias"))
    (tmp_path / "train.py").write_text("model = 3\n")
    document = json.loads(server.run(tmp_path, *command.split(), "--json").out)
    assert first_column(section, heading) == set(document)
    for entry in document.get("files", []):
        assert all(f"`{name}`" in SECTIONS[section] for name in entry)


def test_variables_are_those_that_are_read() -> None:
    config = (Path(__file__).resolve().parent.parent / "nanscan" / "config.py").read_text()
    names = {name for name in first_column("Environment variables", "variable") if name.startswith("NANSCAN_")}
    assert names == set(re.findall(r'"(NANSCAN_[A-Z_]+)"', config))
