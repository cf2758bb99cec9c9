"""All ranks go back together, to the same step, each to its own shards and random numbers, or none does."""

from __future__ import annotations

import pytest

from tests.ranks import Ranks

SCENARIOS = "tests.distributed.recovery_scenarios:"


@pytest.mark.parametrize(
    ("name", "what", "guarded"),
    [
        ("fsdp", "weight", True),
        ("fsdp", "state", False),
        ("fsdp", "loss", True),
        ("mixed", "state", True),
        ("ddp", "weight", False),
        ("tensor_parallel", "weight", True),
    ],
)
def test_what_one_rank_finds_takes_all_back_bit_for_bit(
    worlds: dict[int, Ranks], name: str, what: str, guarded: bool
) -> None:
    answers = worlds[2].run(SCENARIOS + "back_together", name, what, guarded)
    for returned, same, same_rng, causes, _, index in answers:
        assert returned == [False] * 5 + [True] and same and same_rng and index == 3
        assert [(step, to_step) for _, step, to_step in causes] == [(5, 3)]
    assert answers[0][3][0][0] == "rank" and answers[0][4] == "rank 1 has to go back; its own report says why"
    assert answers[1][3][0][0] == ("loss" if what == "loss" else "weights")
    if name == "fsdp" and what == "weight":  # rank 1 holds rows 3 and 4 of 5
        assert "parameter 'down.bias' has 1 NaN, 0 Inf of 5 (first at [4])" in answers[1][4]


def test_four_ranks_of_a_mesh_of_two_dimensions_go_back_together(worlds: dict[int, Ranks]) -> None:
    for returned, same, same_rng, causes, *_ in worlds[4].run(SCENARIOS + "back_together", "hybrid", "state", True):
        assert returned[-1] and same and same_rng and [to_step for *_, to_step in causes] == [3]


def test_an_error_on_one_rank_takes_the_others_back_too(worlds: dict[int, Ranks]) -> None:
    (seen, back, index, values), other = worlds[2].run(SCENARIOS + "raises_on_one_rank")
    assert (seen, back, index) == ([False, True, False], [1], 2) and (seen, back, index, values) == other


def test_where_one_ranks_copies_are_spoiled_all_take_the_checkpoint(worlds: dict[int, Ranks]) -> None:
    for source, to_step, same, later in worlds[2].run(SCENARIOS + "from_disk"):
        assert (source, to_step, same, later) == ("step-00000002", 2, True, "")


def test_a_bad_start_on_one_rank_is_refused_on_all(worlds: dict[int, Ranks]) -> None:
    healthy, bad = worlds[2].run(SCENARIOS + "bad_at_the_start")
    assert healthy.startswith("NonFiniteError") and "another rank's report says what" in healthy
    assert bad.startswith("NonFiniteError") and "parameter 'down.bias' has 1 NaN" in bad
