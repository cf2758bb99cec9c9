"""Tables on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

__all__ = ["print_table", "show_bytes", "show_time"]


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", file: TextIO | None = None
) -> None:
    """Print one table: the first column to the left, figures to the right, misses in colour on a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    stream = file or sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else 150, highlight=False)
    table = Table(title=title, title_justify="left", caption=note or None, caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left", no_wrap=index > 0)
    for row in rows:
        table.add_row(*(Text(text, style="yellow" if "short" in text else "") for text in row))
    console.print(table)


def show_time(seconds: float | None) -> str:
    """Seconds in a unit that suits them.

    Example:
        >>> show_time(3.2e-7), show_time(2.5e-5), show_time(0.0123), show_time(1.5)
        ('320 ns', '25.0 µs', '12.30 ms', '1.50 s')
    """
    if seconds is None:
        return "–"
    for limit, scale, unit, digits in ((1e-6, 1e9, "ns", 0), (1e-3, 1e6, "µs", 1), (1.0, 1e3, "ms", 2)):
        if abs(seconds) < limit:
            return f"{seconds * scale:.{digits}f} {unit}"
    return f"{seconds:.2f} s"


def show_bytes(count: float) -> str:
    """Bytes in a unit that suits them.

    Example:
        >>> show_bytes(512), show_bytes(23_592_960), show_bytes(4 * 2**30)
        ('512 B', '23.6 MB', '4.29 GB')
    """
    for limit, scale, unit, digits in ((1e3, 1, "B", 0), (1e6, 1e3, "kB", 1), (1e9, 1e6, "MB", 1)):
        if count < limit:
            return f"{count / scale:.{digits}f} {unit}"
    return f"{count / 1e9:.2f} GB"
