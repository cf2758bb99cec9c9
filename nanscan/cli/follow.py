"""`nanscan report --follow`: a line for each batch of steps, as the log grows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from nanscan.cli.output import results_console
from nanscan.cli.scan import printable
from nanscan.reporting.follow import Batch, Tail

__all__ = ["follow"]

POLL = 0.25  # seconds
EVERY = 2.0  # seconds: no more lines than that, unless something is wrong


def follow(log: Path) -> None:
    """Print a line for the steps so far, then one for each batch that comes, until Ctrl-C.

    In a terminal, a healthy line is replaced by the next one, and what went wrong stays; a pipe gets each line.

    Raises:
        OSError: the log can't be read.
    """
    console = results_console()
    with contextlib.suppress(KeyboardInterrupt):  # this is how it ends
        if console.is_terminal:
            _live(console, log)
        else:
            for batch in _batches(Tail(log)):
                console.print(_line(batch), soft_wrap=True)
                console.file.flush()


def _live(console: Console, log: Path) -> None:
    with Live(Text("waiting for the first step"), console=console, auto_refresh=False) as live:
        for batch in _batches(Tail(log)):
            if batch.trouble:
                live.console.print(_line(batch))
            live.update(_line(batch), refresh=True)


def _line(batch: Batch) -> Text:
    style = "bold red" if batch.trouble else "green" if not batch.all_skipped else ""
    return Text(printable(batch.describe(), limit=2000), style=style)


def _batches(tail: Tail) -> Iterator[Batch]:
    so_far = tail.read()
    if so_far:
        yield so_far
    while True:
        started = time.monotonic()
        batch = tail.read()
        while not batch.trouble and time.monotonic() - started < EVERY:
            time.sleep(POLL)
            batch += tail.read()
        if batch:
            yield batch
