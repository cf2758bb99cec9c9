"""The table of docs/distributed.md is what its tool finds."""

from __future__ import annotations

import pytest

from tests.ranks import Ranks
from tools.distributed_table import BEGIN, END, PAGE, ROWS, VALUES, line_of_layout, line_of_values

WRITTEN = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()


def test_the_page_has_a_line_for_each_layout_and_each_kind_of_values() -> None:
    assert [line.split(" | ")[0][2:] for line in WRITTEN[2:]] == [*ROWS.values(), *VALUES.values()]
    assert all(line.endswith("| works |") for line in WRITTEN[2:])


@pytest.mark.parametrize("name", ["ddp", "mixed", "two_dimensions", "bfloat16", "large", "small"])
def test_a_line_is_what_both_functions_do(worlds: dict[int, Ranks], name: str) -> None:
    found = line_of_layout(worlds, name) if name in ROWS else line_of_values(worlds, name)
    assert found in WRITTEN
