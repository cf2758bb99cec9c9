"""What ranks say to each other by one sum, without a process group: the sum is taken here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from nanscan.distributed.brief import Brief
from nanscan.distributed.findings import FAILED, FLAGGED, HAS_NAN, BadTensor, Finding, Findings

RANKS = 5
BAD = BadTensor(3.0, 2.0**51 + 7, 2.0, 1.0, 6.5, 0.0, 0.0)


def finding(rank: int, step: int, **changed: float) -> Finding:
    """What a rank says: its own norms, large and small ones, and else what all say."""
    norms = {"finite_norm": (rank + 0.1) * 10.0 ** (60 * rank - 150), "inf_norm": 0.3 * rank}
    return Finding(1.0, step, 0.0, 7.0, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 40.0)._replace(**{**norms, **changed})


class Ranks:
    """Five ranks that add their numbers up."""

    def __init__(self) -> None:
        self.briefs = [Brief(RANKS, rank) for rank in range(RANKS)]

    def step(self, findings: Sequence[Finding], order: Sequence[int] = range(RANKS)) -> Findings | None:
        """What all of them understand, None if all want to be told in full; then they are."""
        numbers = [brief.numbers(own) for brief, own in zip(self.briefs, findings, strict=True)]
        sums = np.zeros_like(numbers[0])
        for rank in order:
            sums = sums + numbers[rank]
        understood = [brief.findings(own, sums) for brief, own in zip(self.briefs, findings, strict=True)]
        if any(found is None for found in understood):
            assert all(found is None for found in understood)
            for brief, own in zip(self.briefs, findings, strict=True):
                brief.told(own, Findings(np.array(findings)))
            return None
        for found in understood:
            assert found is not None
            np.testing.assert_array_equal(np.array(list(found)), np.array(findings))
        return understood[0]


def test_alike_ranks_need_one_sum_from_the_first_step_on() -> None:
    ranks = Ranks()
    for step in range(3):
        assert ranks.step([finding(rank, step) for rank in range(RANKS)])


def test_nothing_is_rounded_in_whatever_order_the_numbers_are_added() -> None:
    for order in ([4, 0, 3, 1, 2], [2, 1, 3, 0, 4]):
        assert Ranks().step([finding(rank, 0) for rank in range(RANKS)], order)


def test_what_ranks_hold_is_told_in_full_once_where_it_is_not_alike() -> None:
    ranks = Ranks()
    held = [
        {"layout": 7.0 + rank, "sketch": math.nan if rank == 2 else rank, "numel": 10.0 * rank} for rank in range(RANKS)
    ]
    told = [
        ranks.step([finding(rank, step)._replace(**held[rank]) for rank in range(RANKS)]) is None for step in range(3)
    ]
    assert told == [True, False, False]
    held[1] = {"layout": 99.0, "sketch": 1.0, "numel": 0.0}  # a part is frozen there
    told = [
        ranks.step([finding(rank, step)._replace(**held[rank]) for rank in range(RANKS)]) is None
        for step in range(3, 6)
    ]
    assert told == [True, False, False]


def test_what_changes_alike_on_all_ranks_needs_no_more_than_the_sum() -> None:
    ranks = Ranks()
    for step in range(4):
        assert ranks.step([finding(rank, step, numel=40.0 + step, losses=step) for rank in range(RANKS)])


@pytest.mark.parametrize("before", [0, 1])
def test_one_bad_gradient_is_in_the_sum_at_any_step(before: int) -> None:
    ranks = Ranks()
    for step in range(before):
        ranks.step([finding(rank, step) for rank in range(RANKS)])
    findings = [finding(rank, before) for rank in range(RANKS)]
    findings[3] = findings[3].with_one_bad(BAD)
    found = ranks.step(findings)
    assert found is not None and found[3].first == BAD and found[3].has(HAS_NAN) and found.flags == HAS_NAN
    assert ranks.step([finding(rank, before + 1) for rank in range(RANKS)])


@pytest.mark.parametrize(
    "wrong",
    [
        {1: {"flags": FAILED}},
        {1: {"flags": FLAGGED}},
        {1: {"step": 8.0}},
        {1: {"step": 8.0}, 2: {"step": 10.0}},  # the mean is right
        {1: {"phase": 2.0}},
        {1: {"bad_tensors": 3.0}},
        {1: {"position": -2.0, "bad_tensors": 1.0, "nan_count": 1.0, "bad_nan": 1.0}},  # a loss
    ],
)
def test_everything_else_is_told_in_full(wrong: dict[int, dict[str, float]]) -> None:
    ranks = Ranks()
    assert ranks.step([finding(rank, 8) for rank in range(RANKS)])
    assert ranks.step([finding(rank, 9)._replace(**wrong.get(rank, {})) for rank in range(RANKS)]) is None
    assert ranks.step([finding(rank, 10) for rank in range(RANKS)])


def test_two_bad_gradients_or_too_many_nan_are_told_in_full() -> None:
    good = [finding(rank, 0) for rank in range(RANKS)]
    two = [own.with_one_bad(BAD) if rank in (0, 4) else own for rank, own in enumerate(good)]
    all_alike = [own.with_one_bad(BAD) for own in good]
    many = [own.with_one_bad(BAD._replace(nan_count=2.0**22)) if rank == 1 else own for rank, own in enumerate(good)]
    fits = [
        own.with_one_bad(BAD._replace(nan_count=2.0**22 - 1)) if rank == 1 else own for rank, own in enumerate(good)
    ]
    assert [Ranks().step(found) is None for found in (two, all_alike, many, fits)] == [True, True, True, False]
