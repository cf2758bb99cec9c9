"""A page whose blocks say what isn't so, or say nothing, fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sybil.document import Document
from sybil.example import SybilFailure

from tests.printed_blocks import parsers

PYTHON = "```python\nprint('norm 3')\nprint('skipped')\n```\n"


def evaluate(page: str, folder: Path) -> None:
    """Check every block of a page."""
    (folder / "page.md").write_text(page)
    for example in Document.parse(str(folder / "page.md"), *parsers()).examples():
        example.evaluate()


@pytest.mark.parametrize(
    "page",
    [
        PYTHON + "```text\nnorm 3\nskipped\n```\n",
        PYTHON + "```text\nnorm …\nskipped\n```\n",
        f"```console\n$ {sys.executable} -c 'print(5)'\n5\n$ {sys.executable} -c ''\n```\n",
    ],
)
def test_what_is_so_passes(page: str, tmp_path: Path) -> None:
    evaluate(page, tmp_path)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (PYTHON + "```text\nnorm 4\nskipped\n```\n", "the page says"),
        (PYTHON + "```text\nnorm 3\n```\n", "the page says"),
        (PYTHON + "```text\n…\n…\n```\n", "says nothing"),
        (f"```console\n$ {sys.executable} -c 'print(5)'\n6\n```\n", "the page says"),
        (f"```console\n$ {sys.executable} -c 'print(5)'\n…\n```\n", "says nothing"),
        (f"```console\n{sys.executable} -c 'print(5)'\n5\n```\n", r"no command after '\$ '"),
        (f"```console\n$ {sys.executable} -c 'print(5); 1 / 0'\n5\n…\n```\n", "ended by an exception"),
    ],
)
def test_what_is_not_so_or_says_nothing_fails(page: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SybilFailure, match=words):
        evaluate(page, tmp_path)
