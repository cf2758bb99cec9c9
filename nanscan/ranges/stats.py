"""The numbers behind a row, such that those of two tensors can be put together."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch

from nanscan.names import dtype_name
from nanscan.ranges.row import RangeRow

__all__ = ["TINY", "Stats", "limit_of", "row_of"]

TINY = 2.0**-14  # the smallest normal float16


class Stats(NamedTuple):
    """What was counted over the elements of one or several tensors.

    ``norm``, ``low`` and ``high`` are over the finite elements; ``low`` > ``high`` if there are none. ``zeros`` and
    ``tiny`` are numbers of elements, not whole ones where they were taken from a sample. ``limit`` is the largest
    number of ``dtype``, that of the tensor whose elements came closest to theirs.
    """

    numel: int
    low: float
    high: float
    norm: float
    zeros: float
    tiny: float
    nans: int
    infs: int
    positive_infs: int
    dtype: str
    limit: float

    @property
    def peak(self) -> float:
        """The largest finite magnitude."""
        return max(-self.low, self.high, 0.0)

    @property
    def rms(self) -> float:
        """Root mean square of the finite elements."""
        finite = self.numel - self.nans - self.infs
        return self.norm / math.sqrt(finite) if finite else math.nan

    def __add__(self, other: object) -> Stats:
        """Those of the elements of both."""
        if not isinstance(other, Stats):
            return NotImplemented
        fuller = self if self.peak / self.limit >= other.peak / other.limit else other
        return Stats(
            self.numel + other.numel, min(self.low, other.low), max(self.high, other.high),
            math.hypot(self.norm, other.norm), self.zeros + other.zeros, self.tiny + other.tiny,
            self.nans + other.nans, self.infs + other.infs, self.positive_infs + other.positive_infs,
            fuller.dtype, fuller.limit,
        )  # fmt: skip


@cache
def limit_of(dtype: torch.dtype) -> tuple[str, float]:
    """A dtype's name and its largest number.

    >>> limit_of(torch.float16)
    ('float16', 65504.0)
    """
    return dtype_name(dtype), float(torch.finfo(dtype).max)


def row_of(step: int, module: str, kind: str, stats: Stats) -> RangeRow:
    """The public row."""
    some = stats.low <= stats.high
    return RangeRow(
        step, module, kind,
        stats.low if some else math.nan, stats.high if some else math.nan, stats.rms,
        stats.zeros / stats.numel, stats.tiny / stats.numel, stats.nans, stats.infs,
    )  # fmt: skip
