"""What many ranks have found, put together without a process group."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanscan.distributed.agreed import AgreedScan
from nanscan.distributed.findings import FAILED, FLAGGED, HAS_NAN, Finding, Findings
from nanscan.distributed.holdings import Plan

RANKS = 300
KINDS = [rank % 100 for rank in range(RANKS)]  # three replicas of a hundred shards
PLAN = Plan(KINDS, [True], lambda *_: 0, lambda *_: 3, lambda *_: None)  # type: ignore[arg-type, return-value]


def table(**changed: Any) -> torch.Tensor:
    """One row for each rank, at step 7; `changed` is of rank 123."""
    rows = []
    for rank in range(RANKS):
        row = Finding(1.0, 7.0, 0.0, 5.0, math.nan, 0.0, 0.0, 0.0, 0.0, 1.5 + rank, 0.1 * rank, 10.0 + rank % 100)
        rows.append(row._replace(**changed) if rank == 123 else row)
    return torch.tensor(rows, dtype=torch.float64)


def agreed(findings: Findings) -> Any:
    own: Any = SimpleNamespace(count=1, signature=0, row_major=None)
    return AgreedScan(own, {}, (), (0, 0), findings, PLAN, 0)


def test_of_replicas_the_largest_counts_and_shards_add_up() -> None:
    scan = agreed(Findings(table()))
    assert scan.finite_norm == scan.norm == math.hypot(*[1.5 + rank for rank in range(200, 300)])
    assert scan.numel == sum(10 + shard for shard in range(100)) and scan.inf_norm == pytest.approx(29.9)
    assert scan.finite and (scan.nan_count, scan.inf_count) == (0, 0)


def test_one_ranks_nan_is_in_the_totals_of_all() -> None:
    scan = agreed(Findings(table(flags=HAS_NAN, nan_count=2.0, inf_count=1.0)))
    assert not scan.finite and math.isnan(scan.norm) and (scan.nan_count, scan.inf_count) == (2, 1)
    assert scan.finite_norm == agreed(Findings(table())).finite_norm


@pytest.mark.parametrize(
    ("changed", "good"),
    [
        ({}, True),
        ({"flags": FLAGGED}, True),
        ({"flags": FAILED}, False),
        ({"step": 8.0}, False),
        ({"phase": 9.0}, False),
    ],
)
def test_one_rank_that_failed_or_is_elsewhere_is_noticed(changed: dict[str, float], good: bool) -> None:
    findings = Findings(table(**changed))
    assert findings.are_about(findings[0]) is good
    assert findings.flags == changed.get("flags", 0)


def test_what_ranks_hold_is_compared_to_the_bit_and_unknown_weights_stay_the_same() -> None:
    before = Findings(table()).held
    assert Findings(table()).held == before
    assert Findings(table(layout=6.0)).held != before and Findings(table(sketch=1.0)).held != before


def test_a_good_step_makes_no_object_for_each_rank() -> None:
    findings = Findings(table())
    assert findings.are_about(Finding(*table()[0].tolist())) and agreed(findings).finite
    assert "_rows" not in vars(findings)
    assert findings[123].finite_norm == 124.5 and len(list(findings)) == len(findings) == RANKS
