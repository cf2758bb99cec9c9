"""What every engine answers: one row per tensor, the totals, and the one error for input that cannot be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Row(NamedTuple):
    """What a scan says of one tensor.

    ``finite_norm`` and ``inf_norm`` are over the finite elements (0.0 where there is none). A complex element counts
    once: as NaN if either part is NaN, else as Inf if either part is Inf. ``first_bad`` is the row-major index of the
    first such element, -1 if none; in a sparse tensor it counts through the (coalesced) values. Of a CUDA tensor whose
    memory is in another order (channels_last), the kernel's first is the one that comes first in memory.
    """

    position: int
    also: tuple[int, ...]
    finite_norm: float
    inf_norm: float
    nan_count: int
    inf_count: int
    first_bad: int


class BadInput(Exception):
    """An engine was given something whose elements it cannot read.

    ``position`` counts through the input (``extra`` continues after it), ``reason`` completes "<name> ...",
    ``kind`` is the exception that the public functions raise with the name put in front.
    """

    def __init__(self, position: int, reason: str, kind: type[Exception]) -> None:
        super().__init__(position, reason, kind)
        self.position = position
        self.reason = reason
        self.kind = kind

    def __str__(self) -> str:
        return f"tensor {self.position} {self.reason}"


class EngineScan(Protocol):
    """The answer of one scan; the native engine's is a C++ object, the others' is a `Scan`."""

    @property
    def finite(self) -> bool: ...
    @property
    def norm(self) -> float: ...
    @property
    def finite_norm(self) -> float: ...
    @property
    def inf_norm(self) -> float: ...
    @property
    def nan_count(self) -> int: ...
    @property
    def inf_count(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def signature(self) -> int: ...
    @property
    def row_major(self) -> bool: ...
    def rows(self) -> list[Row]: ...
    def bad_rows(self) -> list[Row]: ...


class DeferredScan(Protocol):
    """A scan whose answer still is on the device."""

    @property
    def found_inf(self) -> Any: ...
    @property
    def grad_scale(self) -> Any: ...
    @property
    def overflow(self) -> Any: ...  # 1.0 if the gradients hold a NaN or Inf, whatever the extra tensors hold, else 0.0
    @property
    def separate(self) -> bool: ...  # no two gradients share memory, nor one with itself: each can be changed as flat
    def ready(self) -> bool: ...
    def result(self) -> EngineScan: ...


@dataclass(frozen=True)
class Scan:
    """Rows and totals, made by `total`. ``count`` and ``numel`` are of the unique tensors without the extra ones."""

    finite: bool
    norm: float
    finite_norm: float
    inf_norm: float
    nan_count: int
    inf_count: int
    numel: int
    count: int
    all_rows: tuple[Row, ...]
    signature: int = 0
    row_major: bool = False

    def rows(self) -> list[Row]:
        return list(self.all_rows)

    def bad_rows(self) -> list[Row]:
        return [row for row in self.all_rows if row.first_bad >= 0]


def total(rows: Sequence[Row], extra: Sequence[Row], numel: int) -> Scan:
    """Totals of ``rows``. The ``extra`` rows join the NaN/Inf counts, not the norms and not ``numel``."""
    everything = (*rows, *extra)
    finite_norm = math.hypot(*[row.finite_norm for row in rows])
    nan_count = sum(row.nan_count for row in everything)
    inf_count = sum(row.inf_count for row in everything)
    return Scan(
        finite=nan_count == 0 and inf_count == 0,
        norm=norm_of(finite_norm, sum(r.nan_count for r in rows), sum(r.inf_count for r in rows)),
        finite_norm=finite_norm,
        inf_norm=max((row.inf_norm for row in rows), default=0.0),
        nan_count=nan_count,
        inf_count=inf_count,
        numel=numel,
        count=len(rows),
        all_rows=everything,
    )


def norm_of(finite_norm: float, nan_count: int, inf_count: int) -> float:
    """NaN if there is a NaN, else inf if there is an Inf, else ``finite_norm``."""
    if nan_count:
        return math.nan
    return math.inf if inf_count else finite_norm
