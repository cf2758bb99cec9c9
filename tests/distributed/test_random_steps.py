"""Whatever happens on whichever rank: the sum says what the findings say in full, and the same on every rank."""

from __future__ import annotations

import pytest

from tests.ranks import Ranks


@pytest.mark.parametrize(("size", "seed"), [(2, 1), (4, 2)])
def test_the_sum_says_what_the_findings_say_in_full(worlds: dict[int, Ranks], size: int, seed: int) -> None:
    found = worlds[size].of("tests.distributed.random_scenarios").run("random_steps", seed)
    for steps in zip(*found, strict=True):
        for brief, full, calls in steps:
            assert brief == full and calls == steps[0][2]
            assert {**brief, "loss": steps[0][0]["loss"]} == steps[0][0]
    sums_alone = [report for report, _, calls in found[0] if calls == ["allreduce_"]]
    bad = [report for report in sums_alone if not report["finite"]]
    assert len(sums_alone) > len(found[0]) // 4 and len(bad) > 1  # both ways were gone
    assert len(sums_alone) < len(found[0])
