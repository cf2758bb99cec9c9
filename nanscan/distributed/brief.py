"""The verdict on a step in a few numbers that ranks add up: all that is needed where at most one tensor is bad."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

from nanscan.distributed.findings import BadTensor, Finding, Findings

__all__ = ["Brief"]

_PLACE, _COUNTS, _WHO, _WHERE, _LARGEST = range(5)
_NORMS = 5
_LIMIT = 2**22  # of the NaN and of the Inf of the one bad tensor


class Brief:
    """What the ranks of a group say to each other by one sum: 5 numbers, and 2 more for each rank.

    The first one says whether all is said: each rank adds a checksum of what it is about, or 0 if it has more to say,
    and if the sum is not n times one's own, everything has to be told in full. The next four are the bad tensor of a
    rank that has one. Each rank adds its norms to numbers that are 0 on the others, so that nothing is rounded.

    Args:
        ranks: how many there are.
        index: this one's.
    """

    def __init__(self, ranks: int, index: int) -> None:
        self._ranks = ranks
        self._index = index
        self._known: tuple[Finding, Findings] | None = None  # what lasts of one's own and of all findings

    def numbers(self, own: Finding) -> Any:
        """What this rank adds, (5 + 2 * ranks,) of float64."""
        numbers = np.zeros(_NORMS + 2 * self._ranks)
        numbers[_NORMS + 2 * self._index :][:2] = own.finite_norm, own.inf_norm
        if own == own.good():  # a sketch that is NaN is the same object in both, and so counts as equal
            numbers[_PLACE] = self._checksum(own)
        elif self._says_all(own):
            numbers[_PLACE] = self._checksum(own)
            numbers[_COUNTS] = (_LIMIT + own.bad_nan) * _LIMIT + own.bad_inf
            numbers[_WHO] = own.position * self._ranks + self._index
            numbers[_WHERE], numbers[_LARGEST] = own.place, own.bad_inf_norm
        return numbers

    def findings(self, own: Finding, sums: Any) -> Findings | None:
        """What every rank found, from the sums of their numbers; None if that has to be told in full."""
        bad_ranks = sums[_COUNTS] // _LIMIT**2
        if sums[_PLACE] != self._checksum(own) * self._ranks or bad_ranks > 1:
            return None
        if self._is_new(own):
            self.told(own, Findings.alike(own.lasting(), self._ranks))
        assert self._known is not None
        found = self._known[1].good(own, sums[_NORMS:].reshape(-1, 2))
        if bad_ranks:
            position, index = divmod(int(sums[_WHO]), self._ranks)
            nans, infs = divmod(sums[_COUNTS] - _LIMIT**2, _LIMIT)
            found.put_one_bad(index, BadTensor(position, sums[_WHERE], nans, infs, sums[_LARGEST], 0.0, 0.0))
        return found

    def told(self, own: Finding, findings: Findings) -> None:
        """Remember what was told in full."""
        self._known = own.lasting(), findings

    def _is_new(self, own: Finding) -> bool:
        return self._known is None or own.lasting() != self._known[0]

    def _checksum(self, own: Finding) -> int:
        """Of what all ranks have in common: the step, and what they hold where one can't know it from before."""
        lasting = own.lasting()[:12] if self._is_new(own) else ()
        return 1 + zlib.crc32(struct.pack(f"{2 + len(lasting)}d", own.phase, own.step, *lasting))

    def _says_all(self, own: Finding) -> bool:
        """Whether one gradient is all that is wrong here, and fits into the numbers."""
        bad = own.first
        alone = own == own.good().with_one_bad(bad) and bad.position >= 0
        return alone and max(bad.nan_count, bad.inf_count) < _LIMIT
