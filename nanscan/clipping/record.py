"""What a step's report says of a spike. A leaf: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Spike"]


@dataclass(frozen=True)
class Spike:
    """A gradient norm or a loss far above its recent history.

    Attributes:
        what: `"norm"` or `"loss"`.
        value: what it was at this step (the norm unscaled and before clipping).
        expected: the mean of its recent history.
        sigma: by how many standard deviations the value is above that mean.
        limit: the value from which on it counts as a spike.
        action: what was done: `"warn"`, `"clip"` or `"skip"`.

    >>> Spike("norm", 120.0, 2.0, 14.5, 8.0, "skip").describe()
    'the norm 120 is a spike: 14.5 sigma above the 2 of its recent history (limit 8)'
    """

    what: str
    value: float
    expected: float
    sigma: float
    limit: float
    action: str

    def describe(self) -> str:
        """One clause that says what rose, from where and how far."""
        return (
            f"the {self.what} {self.value:.6g} is a spike: {self.sigma:.1f} sigma above the {self.expected:.6g} of its "
            f"recent history (limit {self.limit:.6g})"
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Spike:
        """The inverse of `dataclasses.asdict`, and of its JSON with non-finite numbers as strings."""
        numbers = {name: float(data[name]) for name in ("value", "expected", "sigma", "limit")}
        return cls(what=data["what"], action=data["action"], **numbers)
