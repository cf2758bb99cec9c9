"""What the ranks of a process group found, put together: one verdict that is the same on each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nanscan.distributed.findings import HAS_INF, HAS_NAN, BadTensor, Findings
from nanscan.distributed.holdings import Plan
from nanscan.engine.result import EngineScan, Row

__all__ = ["AgreedScan", "RankRow", "merged", "total_norm"]


class RankRow(NamedTuple):
    """An engine's `Row` and the rank that it was found on; ``first_bad`` counts through the whole tensor.

    The rank is None where all ranks that hold these elements found the same.
    """

    position: int
    also: tuple[int, ...]
    finite_norm: float
    inf_norm: float
    nan_count: int
    inf_count: int
    first_bad: int
    rank: int | None


def total_norm(findings: Findings, plan: Plan) -> float:
    """The norm over all elements that are finite, each counted once; of replicas the largest."""
    return math.hypot(*_by_kind(findings.column("finite_norm"), plan))


def merged(found: Sequence[tuple[int, BadTensor]], plan: Plan) -> list[tuple[int, BadTensor, bool]]:
    """(index of the rank, bad tensor, whether every holder found the same) without repetitions by replicas."""
    same: dict[Any, list[int]] = {}
    for index, bad in found:
        if bad.position >= 0:
            same.setdefault((plan.part(index, int(bad.position)), bad[1:]), []).append(index)
    rows = []
    for index, bad in found:
        everywhere = False
        if bad.position >= 0:
            who = same[plan.part(index, int(bad.position)), bad[1:]]
            everywhere = len(who) == plan.holders(index, int(bad.position)) > 1
            if everywhere and who[0] != index:
                continue
        rows.append((index, bad, everywhere))
    return rows


class AgreedScan:
    """The scan of this rank's gradients with the totals of all ranks.

    Args:
        own: what this rank found.
        places: position -> place in the whole tensor, of its bad rows.
        bad: the bad rows of all ranks.
        repeated: (NaN, Inf) that replicas have found once more.
        findings: what every rank found.
        plan: who counts what.
        rank: this one's.
    """

    def __init__(
        self,
        own: EngineScan,
        places: dict[int, int],
        bad: Sequence[RankRow],
        repeated: tuple[int, int],
        findings: Findings,
        plan: Plan,
        rank: int,
    ) -> None:
        self._own = own
        self._rank = rank
        self._places = places
        self._bad = list(bad)
        self.nan_count = int(findings.column("nan_count").sum()) - repeated[0]
        self.inf_count = int(findings.column("inf_count").sum()) - repeated[1]
        self.finite = not (self.nan_count or self.inf_count)
        self.finite_norm = total_norm(findings, plan)
        self.norm = self.finite_norm  # of the gradients alone: a NaN loss leaves it as it is
        if findings.flags & HAS_NAN:
            self.norm = math.nan
        elif findings.flags & HAS_INF:
            self.norm = math.inf
        self.inf_norm = float(findings.column("inf_norm").max())
        self.numel = int(sum(_by_kind(findings.column("numel"), plan)))
        self.count = own.count
        self.signature = own.signature
        self.row_major = own.row_major
        if hasattr(own, "nbytes"):  # what a compiled scan holds; the history's memory is bounded by it
            self.nbytes = own.nbytes

    def rows(self) -> list[Row]:
        """This rank's rows."""
        rows = [RankRow(*row, self._rank) for row in self._own.rows()]
        return [row._replace(first_bad=self._places.get(row.position, row.first_bad)) for row in rows]  # type: ignore[misc]

    def bad_rows(self) -> list[Row]:
        """The bad rows of all ranks, ordered by rank; the same on each of them."""
        return list(self._bad)  # type: ignore[arg-type]


def _by_kind(values: Any, plan: Plan) -> list[float]:
    """The largest value of each kind of rank."""
    largest = np.zeros(max(plan.kinds) + 1)
    np.maximum.at(largest, plan.kinds, values)
    return list(largest.tolist())
