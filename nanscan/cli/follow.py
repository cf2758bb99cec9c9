"""`nanscan report --follow`: a line for each batch of steps, and for all that happens beside them, as the log grows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from nanscan import tables
from nanscan.cli.output import printable
from nanscan.reporting.follow import Batch, News, Tail

__all__ = ["follow"]

POLL = 0.25  # seconds
EVERY = 2.0  # seconds: no more lines than that, unless something is wrong
WAITS = "that run is over: waiting for the log to be continued (Ctrl-C ends)"
BEFORE = 5  # of what happened before one began to follow, so much is told


def follow(log: Path) -> None:
    """Print a line for the steps so far, then one for each batch that comes, until the run ends, or Ctrl-C.

    In a terminal, a healthy line is replaced by the next one, and what went wrong stays; a pipe gets each line. A log
    that isn't there yet is waited for.

    Raises:
        OSError: the log can't be read.
    """
    console = tables.console_for(sys.stdout)
    if not log.exists():
        print(f"waiting for {printable(str(log))}", file=sys.stderr, flush=True)
    if console.is_terminal:
        _live(console, log)
    else:
        for batch in _batches(Tail(log)):
            _print(console, batch, end=False)
            if batch.steps:
                console.print(_line(batch), soft_wrap=True)
            _print(console, batch, end=True)
            console.file.flush()


def _live(console: Console, log: Path) -> None:
    with Live(Text("waiting for the first step"), console=console, auto_refresh=False) as live:
        for batch in _batches(Tail(log)):
            _print(live.console, batch, end=False)
            if batch.trouble:
                live.console.print(_line(batch))
            if batch.steps:
                live.update(_line(batch), refresh=True)
            _print(live.console, batch, end=True)


def _print(console: Console, batch: Batch, *, end: bool) -> None:
    """What is to be said before the line of the steps, and after it."""
    for item in batch.news:
        if item.end == end:
            console.print(_news(item), soft_wrap=True)


def _news(item: News) -> Text:
    text = f"! {item.text}" if item.bad else item.text
    return Text(printable(text, limit=2000), style="bold red" if item.bad else "bold" if item.end else "cyan")


def _line(batch: Batch) -> Text:
    style = "bold red" if batch.trouble else "green" if not batch.all_skipped else ""
    return Text(printable(batch.describe(), limit=2000), style=style)


def _batches(tail: Tail) -> Iterator[Batch]:
    """What is there, then what comes; ends with the run, unless that was over before."""
    so_far = tail.read()
    if so_far:
        yield replace(so_far, news=so_far.news[-BEFORE:])
    if so_far.ended:
        yield Batch(news=(News(WAITS),))
    while True:
        started = time.monotonic()
        batch = tail.read()
        while not batch.urgent and time.monotonic() - started < EVERY:
            time.sleep(POLL)
            batch += tail.read()
        if batch:
            yield batch
        if batch.ended:
            return
