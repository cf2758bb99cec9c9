"""`nanscan report LOG`: the page of a run, its summary as JSON, or a live line for each batch of steps."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Any

import click

from nanscan.cli.output import common_options, print_json, results_console, status_console
from nanscan.cli.scan import printable

EPILOG = """\b
Exit code: 0 whatever the run was like; 2 misuse: the log isn't there, or the
page can't be written."""


@click.command("report", short_help="Turn a step log into one HTML page, or follow it live.", epilog=EPILOG)
@click.argument("log", type=click.Path(path_type=Path), metavar="RUN.jsonl")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The page.  [default: RUN.html beside the log]")
@click.option("--open", "open_page", is_flag=True, help="Show the page in the browser.")
@click.option("--follow", is_flag=True, help="Print a line for each batch of steps as they come; end with Ctrl-C.")
@common_options
def command(log: Path, output: Path | None, open_page: bool, follow: bool, as_json: bool) -> int:
    """Show what happened in a run, from the log that nanscan.wrap(..., log="run.jsonl") wrote.

    The page holds everything in one file and needs no network: norms, loss and clipping over the steps, what was
    skipped and why, where each NaN came from, layers, ranges, checkpoints, rollbacks and the environment. A log that
    is cut off, mixed up or still being written opens too, and the page says what is missing.

    With --json the summary is printed; a page is then written only if -o asks for it.
    """
    _check(log)
    if follow:
        return _follow(log, as_json=as_json, output=output)
    from nanscan.reporting.reading import read_log
    from nanscan.reporting.summary import summary

    with status_console().status("reading the log"):
        found = read_log(log)
    page = output or (None if as_json else log.with_suffix(".html"))
    if page is not None:
        _write(found, log, page)
    if as_json:
        print_json({"exit_code": 0, "page": str(page) if page else None, **summary(found)})
    else:
        _print(found, page)
    if open_page and page is not None:
        webbrowser.open(page.absolute().as_uri())
    return 0


def _check(log: Path) -> None:
    if log.is_dir():
        raise click.ClickException(f"'{printable(str(log))}' is a folder: give a log, such as run.jsonl")
    if not log.exists():
        raise click.ClickException(
            f"'{printable(str(log))}' is not there: give the path that nanscan.wrap(..., log=...) was given"
        )


def _write(found: Any, log: Path, page: Path) -> None:
    from nanscan.reporting.page import write_page

    if page.exists() and page.samefile(log):
        raise click.ClickException(f"'{printable(str(page))}' is the log itself: choose another file with -o")
    if page.is_dir():
        raise click.ClickException(f"'{printable(str(page))}' is a folder: give a file, such as {page / 'report.html'}")
    with status_console().status("writing the page"):
        write_page(found, page)


def _print(found: Any, page: Path | None) -> None:
    from nanscan.reporting.summary import summary

    console = results_console()
    about = summary(found)
    lines = [f"{found.path}: {about['verdict']}"]
    lines += [
        f"  {row['name']}: bad in {row['steps']} steps, first {row['first_step']}" for row in about["offenders"][:3]
    ]
    lines += [f"  note: {problem}" for problem in found.problems]
    lines += [f"Report: {page}"] if page is not None else []
    for line in lines:
        console.print(printable(line, limit=2000), markup=False, soft_wrap=True)


def _follow(log: Path, *, as_json: bool, output: Path | None) -> int:
    if as_json or output is not None:
        raise click.UsageError("--follow prints lines until it is stopped: leave out --json and -o")
    from nanscan.cli.follow import follow

    follow(log)
    return 0
