"""What the pages promise to stand in the program stands there."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nanscan.cli.app import app
from nanscan.config import Config, load_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


@functools.cache
def spoken() -> str:
    """Every string of the package and its build, those split over lines joined, values in them shown as `…`."""
    texts: list[str] = []
    for path in [*(ROOT / "nanscan").rglob("*.py"), ROOT / "setup.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts).replace("{what}", "…")


def quoted_messages() -> list[str]:
    """The messages of the troubleshooting page: those of its headings and those in the first column of its tables."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"^(?:### |\| )`([^`]+)`", text, re.MULTILINE)


@pytest.mark.parametrize("message", quoted_messages())
def test_each_message_on_the_troubleshooting_page_is_one_that_nanscan_says(message: str) -> None:
    said = spoken()
    pieces = [piece.strip() for piece in re.split(r"…|: |; |:$|'…'", message)]
    pieces = [piece for piece in pieces if len(piece.strip(";.()'")) > 4]
    assert pieces, message
    missing = [piece for piece in pieces if piece not in said]
    assert missing == []


def test_a_message_that_nobody_says_would_be_noticed() -> None:
    assert "nanscan: the moon is not available" not in spoken()
    assert len(quoted_messages()) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


MISSPELT = "scna"  # on purpose, to show what is said about it


def commands_of(page: Path) -> list[list[str]]:
    """The words of each command `nanscan …` on a page, in blocks and in sentences."""
    blocks = re.findall(r"^```(?:console|sh|bash)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^(?:\$ )?(nanscan .*?)$", "\n".join(blocks), re.MULTILINE)
    spoken = re.findall(r"`(nanscan [^`\n]+)`", page.read_text())
    commands = [re.split(r"\s[|>#&]|;", line)[0].split()[1:] for line in [*lines, *spoken]]
    return [words for words in commands if words[0] not in ("…", "COMMAND", MISSPELT)]


def unknown_to_the_command_line(words: list[str]) -> list[str]:
    """The verb, and the options, that `nanscan` does not have."""
    verb = app.commands.get(words[0]) if not words[0].startswith("-") else app
    if verb is None:
        return words[:1]
    known = {option for param in [*verb.params, *app.params] for option in (*param.opts, *param.secondary_opts)}
    options = {word.partition("=")[0].strip("[]") for word in words if re.match(r"\[?-+[a-z]", word)}
    return sorted(options - known - {"--help", "-h"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_verbs_and_options_that_are_written_about(page: Path) -> None:
    assert [(words, wrong) for words in commands_of(page) if (wrong := unknown_to_the_command_line(words))] == []


def test_a_command_that_does_not_exist_would_be_noticed() -> None:
    assert sum(len(commands_of(page)) for page in PAGES) > 20
    assert unknown_to_the_command_line(["scann", "last.pt"]) == ["scann"]
    assert unknown_to_the_command_line(["scan", "last.pt", "--jsno", "--json"]) == ["--jsno"]


def test_files_named_in_contributing_exist() -> None:
    named = re.findall(r"`((?:nanscan|csrc|tests|docs)/[\w./*]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 15
    assert [pattern for pattern in named if not list(ROOT.glob(pattern.rstrip("/")))] == []


def test_guide_lists_every_variable() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    variables = set(re.findall(r"NANSCAN_[A-Z_]+", (ROOT / "nanscan" / "config.py").read_text()))
    assert variables - set(re.findall(r"NANSCAN_[A-Z_]+", guide)) == set()
    assert load_config({}).engine == Config().engine == "auto"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on PATH")
def test_every_make_target_that_is_written_about_exists() -> None:
    commands = {name for page in PAGES for name in re.findall(r"(?:`|^)make ([a-z]+)", page.read_text(), re.MULTILINE)}
    assert {"demo", "test", "bench", "lint", "cuda"} <= commands
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", "-n", *sorted(commands)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ci_runs_the_documented_command_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if not line.startswith("#")]
    assert lines[-1] == "exec make test"
    assert lines[:-1] == ["set -euo pipefail", 'cd "$(dirname "$0")/.."']
