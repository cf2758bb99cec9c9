"""Dropped micro-batches under DistributedDataParallel: two real processes drop the same ones and stay in step."""

from __future__ import annotations

import pytest

from tests.ranks import Ranks, Scenarios


@pytest.fixture
def ranks(worlds: dict[int, Ranks]) -> Scenarios:
    return worlds[2].of("tests.microbatch_scenarios")


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("micro", [0, 1, 2])
def test_a_microbatch_that_is_bad_on_one_rank_is_dropped_on_all(ranks: Scenarios, micro: int, before: bool) -> None:
    found = ranks.run("ddp_drops_on_all_ranks", [(1, micro)], before)
    expected = ranks.run("mean_of_the_rest", [i for i in range(3) if i != micro])[0]
    for weights, dropped, skipped, named in found:
        assert dropped == (micro,) and not skipped
        assert weights == found[0][0], "the same bits on every rank"
        assert [pytest.approx(values, rel=1e-5) for values in expected] == weights
        if not before and micro < 2:
            assert {rank for _, rank in named} == {1}, "every rank hears who has it"


def test_every_rank_loses_another_one(ranks: Scenarios) -> None:
    found = ranks.run("ddp_drops_on_all_ranks", [(0, 0), (1, 1)], False)
    expected = ranks.run("mean_of_the_rest", [2])[0]
    for weights, dropped, _, _ in found:
        assert dropped == (0, 1)
        assert [pytest.approx(values, rel=1e-5) for values in expected] == weights


def test_sparse_gradients_that_cannot_be_averaged_cost_the_window(ranks: Scenarios) -> None:
    found = ranks.run("ddp_drops_on_all_ranks", [(1, 2)], False, True)
    assert [skipped for _, _, skipped, _ in found] == [True, True]
    assert found[0][0] == found[1][0]
