"""What the native engine offers for a watched model: hooks that measure without a way through Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

__all__ = ["RangeEntries", "RangeMeter", "TakeOther"]

TakeOther = Callable[[Any, int, Any], None]  # (record, row, gradient)
Numbers = tuple[int, float, float, float, int, int, int, int, int]  # see `nanscan.engine.measure_ranges`


class RangeEntries(Protocol):
    """What was measured in one step, in the order of measuring; a row is a number that the hooks were made with."""

    @property
    def fresh(self) -> int: ...  # how many were not judged yet
    @property
    def any_inf(self) -> bool: ...

    def judge(self, bounds: Mapping[str, float]) -> tuple[list[int], list[float]] | None:
        """Rows and rms of the fresh ones, which then are judged; None, with nothing changed: look closely.

        That is where a row has several tensors, where one holds a NaN or Inf, or a magnitude above its dtype's bound.
        """

    def take(self) -> list[tuple[int, Numbers, str, bool]]:
        """Row, numbers, dtype's name and whether fresh of each; then there are none."""


class RangeMeter(Protocol):
    """Measures plain tensors of the host, the activation of a module into its row and the gradient into row + 1.

    `record.touched` becomes True when something fresh is added to entries that had nothing fresh.
    """

    def entries(self) -> RangeEntries: ...  # for a new step
    def begin(self, record: Any, entries: RangeEntries) -> None: ...  # a forward begins; `record` is for `take_other`
    def end(self) -> None: ...
    def close(self) -> None: ...
    def clear(self) -> None: ...
    def is_new(self, tensor: Any) -> bool: ...
    def hook(self, row: int) -> Callable[[Any], bool]: ...  # called with an output; False: nothing was done

    def watched_call(self, row: int, call: Callable[..., Any], other: Callable[[Any], None]) -> Callable[..., Any]:
        """`call`, with the hook looking at each result; `other` is called with those where it did nothing."""
