"""What a command prints: results to stdout, names escaped so that none steers the terminal, strict JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import click

from nanscan import tables

__all__ = [
    "common_options",
    "json_for_all",
    "object_prints_to_stderr",
    "plural",
    "print_json",
    "print_lines",
    "printable",
]

LONGEST = 300  # characters of a name on a terminal; a pipe gets the whole
_JSON = "nanscan.json"  # the key in what click hands from the program's context to the verb's
_F = TypeVar("_F", bound=Callable[..., Any])


def common_options(command: _F) -> _F:
    """Give a verb the options that all of them have."""
    command = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")(command)
    told = click.option(
        "--json", "as_json", is_flag=True, callback=_or_before, help="Print one JSON document and nothing else."
    )
    return told(command)


def json_for_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """`nanscan --json scan …` is `nanscan scan --json …`: the option before the verb holds for it."""
    ctx.meta[_JSON] = value


def _or_before(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    return value or bool(ctx.meta.get(_JSON))


def printable(text: str, limit: int | None = None) -> str:
    """`text` without control characters: a name in a foreign file must not steer the terminal.

    Args:
        text: any, also with half a surrogate pair, as names of files have it that are not UTF-8.
        limit: cut out the middle of a longer one.

    >>> printable("w\\x1b[2J")
    'w\\\\x1b[2J'
    """
    if limit is not None and len(text) > limit:
        text = f"{text[: limit - 20]}…{text[-19:]}"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def name_limit() -> int | None:
    """How long a name may be where stdout leads."""
    return LONGEST if sys.stdout.isatty() else None


def plural(count: int, noun: str) -> str:
    """`1 tensor`, `2,000 tensors`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def print_lines(lines: Iterable[str], style: str = "") -> None:
    """Print lines as results, escaped."""
    from rich.text import Text

    console = tables.console_for(sys.stdout)
    for line in lines:
        console.print(Text(tables.shown(printable(line), sys.stdout), style=style))


def print_json(document: dict[str, Any]) -> None:
    """Print one document of strict JSON; a float that is not finite becomes a string, as in the step log."""
    click.echo(json.dumps(_strict(document), indent=2, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


@contextlib.contextmanager
def object_prints_to_stderr() -> Iterator[None]:
    """What an object's own code prints, in Python or below it, is no part of the answer: stdout leads to stderr."""
    sys.stdout.flush()
    try:
        stdout, stderr = sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, AttributeError):  # a test's streams have none
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    kept = os.dup(stdout)
    os.dup2(stderr, stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, stdout)
        os.close(kept)
