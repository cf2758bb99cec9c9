"""Rows as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from nanscan.ranges.row import RangeRow

__all__ = ["text_table"]

_COLUMNS = ("step", "module", "kind", "min", "max", "rms", "zero", "underflow", "NaN", "Inf")


def text_table(rows: Sequence[RangeRow]) -> str:
    """A table with a line for each row, names to the left and figures to the right.

    >>> print(text_table([RangeRow(3, "fc", "activation", -1.0, 2.0, 0.5, 0.25, 0.0, 0, 0)]))
    step  module  kind        min  max  rms  zero    underflow  NaN  Inf
       3  fc      activation   -1    2  0.5  25.0 %      0.0 %    0    0
    """
    lines = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return "\n".join(_line(cells, widths, head=number == 0) for number, cells in enumerate(lines))


def _cells(row: RangeRow) -> tuple[str, ...]:
    numbers = [f"{value:.4g}" for value in (row.min, row.max, row.rms)]
    parts = [f"{value * 100:.1f} %" for value in (row.zero_fraction, row.underflow_fraction)]
    return (str(row.step), row.module, row.kind, *numbers, *parts, str(row.nan_count), str(row.inf_count))


def _line(cells: Sequence[str], widths: Sequence[int], head: bool) -> str:
    padded = [
        cell.ljust(width) if head or index in (1, 2) else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()
