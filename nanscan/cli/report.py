"""`nanscan report LOG`: the page of a run, its summary as JSON, or a live line for each batch of steps."""

from __future__ import annotations

import contextlib
import os
import sys
import webbrowser
import zipfile
from pathlib import Path
from typing import Any

import click

from nanscan.cli.inputs import OF_SHELL, refuse_irregular
from nanscan.cli.output import common_options, plural, print_json, print_lines, printable
from nanscan.cli.progress import working
from nanscan.cli.verb import FileName, Verb


@click.command(
    "report",
    cls=Verb,
    short_help="Turn a step log into one HTML page, or follow it live.",
    examples={
        "nanscan report run.jsonl": "writes run.html beside it",
        "nanscan report run.jsonl --open": "and shows it",
        "nanscan report --follow run.jsonl": "while the run goes on",
        "nanscan report run.jsonl --json | jq .verdict": "the summary",
    },
    exits="0 whatever the run was like; 2 misuse.",
)
@click.argument("log", type=FileName(path_type=Path), metavar="LOG")
@click.option("-o", "--output", type=FileName(path_type=Path), help="The page.  [default: LOG with .html]")
@click.option("--open", "open_page", is_flag=True, help="Show the page in the browser.")
@click.option("--follow", is_flag=True, help="Print a line for each batch of steps, until the run ends.")
@common_options
def command(log: Path, output: Path | None, open_page: bool, follow: bool, as_json: bool) -> int:
    """Show what happened in a run, from its log: nanscan.wrap(..., log=FILE).

    The page is one file that needs no network. A log that is cut off, mixed up or still being written opens, too.
    With --json, a page is written only if -o or --open asks for it.
    """
    _check(log, may_come=follow)
    if follow:
        return _follow(log, others=as_json or open_page or output is not None)
    from nanscan.reporting.reading import read_log
    from nanscan.reporting.summary import summary

    with working(f"reading {log.name}"):
        found = read_log(log)
    if found.foreign:
        raise _no_log(log)
    page = output or (None if as_json and not open_page else _beside(log))
    to_stdout = page is not None and _is_stdout(page)
    if to_stdout and as_json:
        raise click.UsageError("The page and --json can't both go to stdout: give -o a file.")
    if page is not None:
        _write(found, log, page)
    if as_json:
        print_json({"exit_code": 0, "page": str(page) if page else None, **summary(found)})
    elif not to_stdout:
        _print(found, page)
    if open_page and page is not None and not webbrowser.open(page.absolute().as_uri()):
        click.echo(f"nanscan: no browser could be started: open {printable(str(page))} yourself", err=True)
    return 0


def _check(log: Path, *, may_come: bool) -> None:
    if log.is_dir():
        raise click.ClickException(f"'{printable(str(log))}' is a folder: give a log, such as run.jsonl")
    refuse_irregular(log, "a log")
    if not log.exists() and not may_come:
        raise click.ClickException(
            f"'{printable(str(log))}' is not there: give the path that nanscan.wrap(..., log=...) was given"
        )


def _no_log(log: Path) -> click.ClickException:
    name = printable(str(log))
    checkpoint = f"; for a checkpoint: nanscan scan {name}" if zipfile.is_zipfile(log) else ""
    return click.ClickException(
        f"'{name}' is no log of steps: not one line of it is. Give the file that nanscan.wrap(..., log=...) was "
        f"given{checkpoint}"
    )


def _beside(log: Path) -> Path:
    if str(log).startswith(OF_SHELL):
        raise click.UsageError(f"No page can lie beside '{printable(str(log))}': say where it goes with -o.")
    return log.with_suffix(".html")


def _is_stdout(page: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):  # not there; a stream without a file
        return os.path.samestat(page.stat(), os.fstat(sys.stdout.fileno()))
    return False


def _write(found: Any, log: Path, page: Path) -> None:
    """Write the page; until it is whole, what was there stays."""
    from nanscan.cli.replacing import replaced
    from nanscan.reporting.page import write_page

    if page.exists() and page.samefile(log):
        raise click.ClickException(f"'{printable(str(page))}' is the log itself: choose another file with -o")
    if page.is_dir():
        raise click.ClickException(f"'{printable(str(page))}' is a folder: give a file, such as {page / 'report.html'}")
    with working(f"writing {page.name}"), replaced(page) as new:
        write_page(found, new)


def _print(found: Any, page: Path | None) -> None:
    from nanscan.reporting.advice import NO_END
    from nanscan.reporting.summary import summary

    about = summary(found)
    print_lines([f"{found.path}: {about['verdict']}"])
    print_lines(
        f"  {row['name']}: bad in {plural(row['steps'], 'step')}, first {row['first_step']}"
        for row in about["offenders"][:3]
    )
    if about["ended"] == NO_END:
        print_lines([f"  end: {NO_END}"])
    print_lines(f"  next: {text}" for text in about["advice"])
    print_lines(f"  note: {problem}" for problem in found.problems)
    print_lines([f"Report: {page}"] if page is not None else [])


def _follow(log: Path, *, others: bool) -> int:
    if others:
        raise click.UsageError("--follow prints lines until it is stopped: leave out --json, --open and -o.")
    from nanscan.cli.follow import follow
    from nanscan.reporting.follow import NoLog

    try:
        follow(log)
    except NoLog as error:
        raise _no_log(log) from error
    return 0
