"""Limits that follow the run are the same on every rank of a process group."""

from __future__ import annotations

import pytest

from tests.ranks import Ranks


@pytest.mark.parametrize("rule", ["autoclip", "zclip"])
def test_every_rank_has_the_same_limits_histories_and_skips(worlds: dict[int, Ranks], rule: str) -> None:
    (told, state), (other_told, other_state) = worlds[2].run("tests.clip_rank_scenarios:follow", rule)
    assert told == other_told
    assert state == other_state
    assert [(step, what) for step, (_, _, skipped, what) in enumerate(told) if skipped] == [(40, "norm"), (45, "loss")]
    assert told[-1][1] is not None, "a limit was in force"
