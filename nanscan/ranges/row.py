"""What `watch` says: one row per module, kind and step, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["OutOfRange", "RangeRow"]


@dataclass(frozen=True)
class RangeRow:
    """The range of all that one module returned in one step, or of the gradients with respect to it.

    Attributes:
        step: which forward of the watched model in training this was, from 0.
        module: the module's dotted path; the watched model itself goes by its class name.
        kind: `"activation"` or `"gradient"`.
        min: the smallest finite element (of a complex tensor: the smallest modulus); NaN if there is no finite one.
        max: the largest finite element (modulus); NaN if there is no finite one.
        rms: root of the mean square of the finite elements; NaN if there are none.
        zero_fraction: which part of all elements is exactly 0, from 0.0 to 1.0.
        underflow_fraction: which part of all elements is not 0, but below 2^-14 = 6.1e-5 in magnitude: in float16
            these are subnormal or become 0.
        nan_count: how many elements are NaN. A complex element counts once.
        inf_count: how many elements are Inf and not NaN.

    >>> RangeRow(3, "fc", "activation", -1.0, 2.0, 0.5, 0.25, 0.0, 0, 0).to_dict()["max"]
    2.0
    """

    step: int
    module: str
    kind: str
    min: float
    max: float
    rms: float
    zero_fraction: float
    underflow_fraction: float
    nan_count: int
    inf_count: int

    def to_dict(self) -> dict[str, Any]:
        """The row as a dict of plain values, one entry for each attribute."""
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """One line for people.

        >>> RangeRow(3, "fc", "activation", -1.0, 2.0, 0.5, 0.25, 0.0, 0, 0).describe()
        "step 3, activation of 'fc': -1 to 2, rms 0.5, 25.0 % zero, 0.0 % underflow, 0 NaN, 0 Inf"
        """
        return (
            f"step {self.step}, {self.kind} of '{self.module}': {self.min:.4g} to {self.max:.4g}, rms {self.rms:.4g}, "
            f"{self.zero_fraction:.1%} zero, {self.underflow_fraction:.1%} underflow, "
            f"{self.nan_count} NaN, {self.inf_count} Inf"
        ).replace("%", " %")


@dataclass(frozen=True)
class OutOfRange(RangeRow):
    """The row that left its range, and how.

    Attributes:
        reason: in words: non-finite, close to the largest number of its dtype or of float16, or a sudden jump.

    >>> OutOfRange(3, "fc", "activation", -1.0, 2.0, 0.5, 0.25, 0.0, 1, 0, "has 1 NaN").reason
    'has 1 NaN'
    """

    reason: str = ""

    def describe(self) -> str:
        """One line for people."""
        return f"step {self.step}, {self.kind} of '{self.module}': {self.reason}"
