"""The tables of the benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from nanscan import tables
from nanscan.tables import show_bytes, show_time

__all__ = ["print_table", "show_bytes", "show_time"]


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", file: TextIO | None = None
) -> None:
    """Print one table: the first column to the left, figures to the right, misses in colour on a terminal."""
    tables.print_table(
        columns, rows, file or sys.stdout, title=title, note=note,
        style=lambda row: "yellow" if any("short" in cell for cell in row) else "",
    )  # fmt: skip
