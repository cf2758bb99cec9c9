"""What the ranks of a process group found, put together: one verdict that is the same on each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from nanscan.engine.result import EngineScan, Row

__all__ = ["AgreedScan", "Finding", "RankRow"]


class Finding(NamedTuple):
    """What one rank tells the others in a step: numbers that float64 holds exactly, and the norms.

    ``phase`` and ``step`` say what is being shared, so that ranks which called different things notice. ``position``,
    ``place``, ``bad_numel``, ``bad_nan``, ``bad_inf`` are of the first bad tensor, -1 or 0 if there is none; ``place``
    counts through its (dense) shape.
    """

    phase: float
    step: float
    failed: float
    flagged: float
    params: float
    losses: float
    nan_count: float
    inf_count: float
    bad_tensors: float
    position: float
    place: float
    bad_numel: float
    bad_nan: float
    bad_inf: float
    bad_inf_norm: float
    norm: float
    finite_norm: float
    inf_norm: float
    numel: float


class RankRow(NamedTuple):
    """An engine's `Row` and the rank that it was found on; ``first_bad`` counts through the dense shape."""

    position: int
    also: tuple[int, ...]
    finite_norm: float
    inf_norm: float
    nan_count: int
    inf_count: int
    first_bad: int
    rank: int


class AgreedScan:
    """The scan of this rank's gradients with the totals of all ranks, whose gradients are meant to be the same.

    Counts are sums over the ranks. Norms are the largest of any rank's: one number, the same on each of them, so that
    all clip by the same factor also where their gradients are not the same to the last bit.

    Args:
        own: what this rank found.
        own_bad: its bad rows, with the index in the dense shape.
        others_bad: of each other rank that found something bad, its first.
        findings: what every rank found.
        rank: this one's.
    """

    def __init__(
        self,
        own: EngineScan,
        own_bad: Sequence[Row],
        others_bad: Sequence[RankRow],
        findings: Sequence[Finding],
        rank: int,
    ) -> None:
        self._own = own
        self._rank = rank
        self._own_bad = [RankRow(*row, rank) for row in own_bad]
        self._others_bad = list(others_bad)
        self.nan_count = int(sum(finding.nan_count for finding in findings))
        self.inf_count = int(sum(finding.inf_count for finding in findings))
        self.finite = not (self.nan_count or self.inf_count)
        self.finite_norm = max(finding.finite_norm for finding in findings)
        norms = [
            finding.norm for finding in findings
        ]  # those of the gradients alone: a NaN loss leaves them as they are
        self.norm = math.nan if any(map(math.isnan, norms)) else max(norms)
        self.inf_norm = max(finding.inf_norm for finding in findings)
        self.numel = int(max(finding.numel for finding in findings))
        self.count = own.count
        self.signature = own.signature
        self.row_major = own.row_major
        if hasattr(own, "nbytes"):  # what a compiled scan holds; the history's memory is bounded by it
            self.nbytes = own.nbytes

    def rows(self) -> list[Row]:
        """This rank's rows."""
        bad = {row.position: row for row in self._own_bad}
        return [bad.get(row.position, RankRow(*row, self._rank)) for row in self._own.rows()]  # type: ignore[misc]

    def bad_rows(self) -> list[Row]:
        """This rank's bad rows and of every other rank the first one, ordered by rank."""
        rows = sorted(self._own_bad + self._others_bad, key=lambda row: row.rank)
        return rows  # type: ignore[return-value]
