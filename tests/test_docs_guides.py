"""The pages on benchmarks and peers say what the suites and the peers are."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.__main__ import SUITES
from tools import peers_table

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_every_suite_of_benchmarks_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "benchmarks.md").read_text(), re.MULTILINE)
    assert rows == list(SUITES)


def told_of_peers() -> list[list[str]]:
    """The cells of the table in docs/peers.md that the tool has written."""
    part = (DOCS / "peers.md").read_text().partition(peers_table.START)[2].partition(peers_table.END)[0]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in part.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("peer", peers_table.PEERS)
def test_the_table_of_peers_is_what_they_do(peer: str) -> None:
    package, step = peers_table.PEERS[peer]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    head, _, *rows = told_of_peers()
    told = {row[0]: row[head.index(peer)] for row in rows}
    assert {what: look(peers_table.Trial(step)) for what, look in peers_table.ROWS.items()} == told
