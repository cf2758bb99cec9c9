"""What is going on meanwhile: a spinner or a bar on stderr, where that is a terminal, and nothing elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from nanscan import tables
from nanscan.cli.output import printable

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

__all__ = ["bars", "is_shown", "running", "short", "working"]


def is_shown() -> bool:
    """True if somebody may be watching: a pipe, a log file and a terminal that can't move its cursor get nothing."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def bars(*columns: str | ProgressColumn, kept: bool = False) -> Progress:
    """Bars on stderr; results may be printed to stdout meanwhile if that is no terminal.

    Args:
        columns: what they show.
        kept: leave them on the screen at the end.
    """
    from rich.progress import Progress

    # rich would else print what goes to stdout itself, to stderr
    return Progress(
        *columns,
        console=tables.console_for(sys.stderr),
        transient=not kept,
        redirect_stdout=False,
        disable=not is_shown(),
    )


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner with a text, for as long as the block takes; yields what changes the text."""
    if not is_shown():
        yield lambda what: None
        return
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    with running(bars(SpinnerColumn("line"), text, TimeElapsedColumn())) as progress:
        task = progress.add_task(short(what))
        yield lambda what: progress.update(task, description=short(what))


@contextlib.contextmanager
def running(progress: Progress) -> Iterator[Progress]:
    """Draw it while the block runs; the cursor comes back also where Ctrl-C comes while it is being started."""
    try:
        progress.start()
        yield progress
    finally:
        progress.stop()


def short(text: str, beside: int = 12) -> str:
    """The beginning of `text`, on one line of the terminal, beside a clock or a bar of ``beside`` columns."""
    line, room = printable(text), max(20, (tables.width(sys.stderr) or 80) - beside)
    return line if len(line) <= room else f"{line[: room - 3]}..."
