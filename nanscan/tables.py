"""Tables and units: one look for every command, aligned, made to fit a terminal, whole and searchable in a pipe."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = [
    "console_for",
    "fact_lines",
    "print_facts",
    "print_table",
    "show_bytes",
    "show_time",
    "shown",
    "table_lines",
    "width",
]

GAP = "  "
HEADING = "bold cyan"
PAD_TO = 60  # characters: one long name does not push the figures of all other rows out of sight
PIPE_WIDTH = 1 << 20  # rich wants a number
NARROW = 48  # characters: below, a fact stands under its name, not beside it
ASCII = str.maketrans({"µ": "u", "÷": "/", "×": "x", "≥": ">=", "≤": "<=", "–": "-", "…": "...", "→": "->", "’": "'"})


def console_for(stream: TextIO) -> Console:
    """A console that shows every text as it is: no markup, no emoji, nothing cut; colour where the stream wants it."""
    from rich.console import Console

    return Console(
        file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True, width=width(stream) or PIPE_WIDTH
    )


def width(stream: TextIO) -> int | None:
    """Columns of the terminal behind ``stream`` (or ``COLUMNS``); None for a pipe or a file: lines of any length."""
    if not stream.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    try:
        return int(given) if given.isdecimal() and int(given) else os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    stream: TextIO,
    *,
    title: str = "",
    note: str = "",
    text_columns: Sequence[int] = (0,),
    style: Callable[[Sequence[str]], str] = lambda row: "",
) -> None:
    """Print one table: texts to the left, figures to the right.

    Args:
        columns: the headings.
        rows: a text for each column.
        stream: where to; a terminal too narrow for the rows gets a block for each row instead.
        title, note: a line above and below; a table with a title is followed by an empty line.
        text_columns: the positions of the columns that hold texts.
        style: row -> how rich colours it on a terminal.
    """
    from rich.text import Text

    console, limit = console_for(stream), width(stream)
    if title:
        console.print(Text(shown(title, stream), style="bold"))
    lines = table_lines(columns, rows, limit=limit, text_columns=text_columns, style=style)
    for line in lines:
        console.print(_shown_text(line, stream))
    for part in textwrap.wrap(note, limit) if limit else [note] if note else []:
        console.print(Text(shown(part, stream), style="dim"))
    if title:
        console.print()


def table_lines(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    limit: int | None = None,
    text_columns: Sequence[int] = (0,),
    style: Callable[[Sequence[str]], str] = lambda row: "",
) -> list[Text]:
    """The lines of a table, none of them cut.

    Args:
        limit: columns of the terminal; None: any.

    >>> [line.plain for line in table_lines(["name", "nan_count"], [["fc.weight", "3"], ["b", "12"]])]
    ['  name       nan_count', '  fc.weight          3', '  b                 12']
    >>> [line.plain for line in table_lines(["name", "nan_count"], [["fc.weight", "3"]], limit=18)]
    ['  fc.weight', '    nan_count 3']
    """
    from rich.cells import cell_len

    cells = [columns, *rows]
    widths = [min(PAD_TO, max(cell_len(row[at]) for row in cells)) for at in range(len(columns))]
    styles = [HEADING, *(style(row) for row in rows)]
    lines = [_line(row, widths, text_columns, look) for row, look in zip(cells, styles, strict=True)]
    if limit is not None and any(line.cell_len > limit for line in lines):
        pairs = zip(rows, styles[1:], strict=True)
        return [line for row, look in pairs for line in _block(columns, row, limit, look)]
    return lines


def _line(row: Sequence[str], widths: Sequence[int], text_columns: Sequence[int], style: str) -> Text:
    from rich.cells import cell_len
    from rich.text import Text

    padding = [" " * max(0, size - cell_len(cell)) for cell, size in zip(row, widths, strict=True)]
    texts = [
        cell + space if at in text_columns else space + cell
        for at, (cell, space) in enumerate(zip(row, padding, strict=True))
    ]
    return Text(GAP + GAP.join(texts).rstrip(), style=style)


def _block(columns: Sequence[str], row: Sequence[str], limit: int, style: str) -> Iterator[Text]:
    """One row under its first cell, each figure behind its heading."""
    from rich.cells import cell_len
    from rich.text import Text

    yield Text(GAP + (row[0] or columns[0]), style=style or "bold")
    line = ""
    for piece in [f"{name} {cell}" for name, cell in zip(columns[1:], row[1:], strict=True) if cell]:
        if line and cell_len(line) + cell_len(piece) + 3 * len(GAP) > limit:
            yield Text(2 * GAP + line, style=style)
            line = ""
        line = f"{line}{GAP}{piece}" if line else piece
    if line:
        yield Text(2 * GAP + line, style=style)


def print_facts(facts: Mapping[str, str], stream: TextIO) -> None:
    """Print names and what they are: `python  3.11.2`."""
    console = console_for(stream)
    for line in fact_lines(facts, limit=width(stream)):
        console.print(_shown_text(line, stream))


def fact_lines(facts: Mapping[str, str], *, limit: int | None = None) -> Iterator[Text]:
    """A line for each fact, or several where the terminal is narrower.

    >>> [line.plain for line in fact_lines({"python": "3.11.2", "gpus": "none visible"})]
    ['python  3.11.2', 'gpus    none visible']
    """
    from rich.text import Text

    beside = max(map(len, facts), default=0) + len(GAP)
    for name, value in facts.items():
        if limit is None:
            yield Text.assemble((name.ljust(beside), HEADING), value)
            continue
        indent = beside if limit >= NARROW else len(GAP)
        parts = textwrap.wrap(value, max(1, limit - indent), break_long_words=False, break_on_hyphens=False) or [""]
        if indent == beside:
            yield Text.assemble((name.ljust(beside), HEADING), parts.pop(0))
        else:
            yield Text(name, style=HEADING)
        yield from (Text(" " * indent + part) for part in parts)


def shown(text: str, stream: TextIO) -> str:
    """`text`, or what stands for it where the stream knows ASCII only."""
    utf = (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")
    return text if utf else text.translate(ASCII)


def _shown_text(line: Text, stream: TextIO) -> Text:
    line.plain = shown(line.plain, stream)
    return line


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
