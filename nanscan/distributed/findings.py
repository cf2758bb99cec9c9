"""What each rank of a group has found at a step, as numbers that it can tell the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

__all__ = ["DUE", "FAILED", "FLAGGED", "HAS_INF", "HAS_NAN", "NOTHING", "BadTensor", "Finding", "Findings"]

FAILED, FLAGGED, HAS_NAN, HAS_INF, DUE = 1, 2, 4, 8, 16  # bits of Finding.flags


class BadTensor(NamedTuple):
    """A tensor with a NaN or Inf, as one rank tells it: numbers that float64 holds exactly, and a norm.

    ``position`` is that of a gradient, or -2, -3, … for the losses; -1: none. ``place`` counts through the whole
    tensor. ``numel`` and ``dtype`` (a number of `DTYPES`) are of a loss.
    """

    position: float
    place: float
    nan_count: float
    inf_count: float
    inf_norm: float
    numel: float
    dtype: float


class Finding(NamedTuple):
    """What one rank tells the others in a step.

    ``phase`` and ``step`` say what is being shared, so that ranks which called different things notice; ``layout`` and
    ``sketch`` say what the rank holds. ``flags``: FAILED, FLAGGED by a gradient scaler, HAS_NAN, HAS_INF in the
    gradients, a snapshot is DUE. Norm and ``numel`` are of the elements that count on this rank. The last seven are its
    first bad tensor.
    """

    phase: float
    step: float
    flags: float
    layout: float
    sketch: float
    losses: float
    nan_count: float
    inf_count: float
    bad_tensors: float
    finite_norm: float
    inf_norm: float
    numel: float
    position: float = -1.0
    place: float = -1.0
    bad_nan: float = 0.0
    bad_inf: float = 0.0
    bad_inf_norm: float = 0.0
    bad_numel: float = 0.0
    bad_dtype: float = 0.0

    def lasting(self) -> Finding:
        """What of it stays the same from one good step to the next."""
        return NOTHING._replace(layout=self.layout, sketch=self.sketch, numel=self.numel)

    def good(self) -> Finding:
        """What it would be if nothing were wrong here."""
        return self.lasting()._replace(
            phase=self.phase,
            step=self.step,
            losses=self.losses,
            finite_norm=self.finite_norm,
            inf_norm=self.inf_norm,
        )

    def with_one_bad(self, bad: BadTensor) -> Finding:
        """What it would be if this gradient were all that is wrong here."""
        return Finding(*self[:12], *bad)._replace(
            flags=HAS_NAN if bad.nan_count else HAS_INF,
            nan_count=bad.nan_count,
            inf_count=bad.inf_count,
            bad_tensors=1.0,
        )

    def has(self, flag: int) -> bool:
        """Whether a bit of ``flags`` is set."""
        return bool(int(self.flags) & flag)

    @property
    def first(self) -> BadTensor:
        """The first bad tensor."""
        return BadTensor(*self[12:])


NOTHING = Finding(*[0.0] * 12)


class Findings(Sequence[Finding]):
    """Every rank's finding, by rank. A good step takes its totals without an object for each of perhaps thousands.

    Args:
        table: (ranks, 19) of float64, a row for each rank; taken over, not copied.
    """

    def __init__(self, table: Any) -> None:
        self._table = np.asarray(table)

    @classmethod
    def alike(cls, own: Finding, ranks: int) -> Findings:
        """The findings of ranks that all say the same."""
        return cls(np.tile(np.array(own, dtype=np.float64), (ranks, 1)))

    def put_one_bad(self, index: int, bad: BadTensor) -> None:
        """Note a gradient that is all that is wrong on one rank; before anyone has read these."""
        self._table[index] = Finding(*self._table[index].tolist()).with_one_bad(bad)

    def good(self, own: Finding, norms: Any) -> Findings:
        """What ranks that hold the same as here say at another, good step.

        Args:
            own: what one of them says at it.
            norms: (ranks, 2) of float64: ``finite_norm`` and ``inf_norm`` of each rank.
        """
        found = Findings.alike(own.good(), len(norms))
        for name in ("layout", "sketch", "numel"):
            found.column(name)[:] = self.column(name)
        found.column("finite_norm")[:], found.column("inf_norm")[:] = norms.T
        return found

    @cached_property
    def _rows(self) -> list[Finding]:
        return [Finding(*row) for row in self._table.tolist()]

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def column(self, name: str) -> Any:
        """One number of each rank, as an array."""
        return self._table[:, Finding._fields.index(name)]

    @cached_property
    def flags(self) -> int:
        """The flags that any rank has set."""
        return int(np.bitwise_or.reduce(self.column("flags").astype(np.int64)))

    @cached_property
    def held(self) -> bytes:
        """What says whether any rank holds other parameters than before: layouts and sketches, to the bit."""
        return bytes(np.stack([self.column("layout"), self.column("sketch")]).tobytes())

    def are_about(self, own: Finding) -> bool:
        """Whether no rank has failed, and all share the same thing of the same step."""
        return not self.flags & FAILED and bool((self._table[:, :2] == own[:2]).all())
