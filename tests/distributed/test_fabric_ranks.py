"""Lightning's Fabric with DDP: two processes act on one verdict."""

from __future__ import annotations

import pytest

from tests.ranks import Ranks


@pytest.mark.parametrize("order", ["before", "after", "after with group"])
def test_fabric_with_ddp_skips_on_both_ranks(worlds: dict[int, Ranks], order: str) -> None:
    one, other = worlds[2].run("tests.distributed.fabric_scenarios:trained", order)
    assert one == other and one[2:] == (2, 2)
    seen = one[0]
    by_group = order != "after"  # else DDP's equal gradients need no word, and none is planted
    assert [skipped for _, skipped, _ in seen] == [False, by_group, False, True, False]
    if by_group:
        (row,) = seen[1][2]["bad"]
        assert (row["name"], row["rank"], row["first_bad"]) == ("2.weight", 1, [4, 7])
    assert {row["name"] for row in seen[3][2]["bad"]} == {
        f"{i}.{part}" for i in (0, 2, 4) for part in ("weight", "bias")
    }
