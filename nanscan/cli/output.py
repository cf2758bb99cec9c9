"""Where output goes: results to stdout, progress to stderr; plain text in a pipe, colour only where it is wanted."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console

__all__ = ["common_options", "print_json", "results_console", "status_console"]

PIPE_WIDTH = 120
_F = TypeVar("_F", bound=Callable[..., Any])


def common_options(command: _F) -> _F:
    """Give a verb the options that all of them have."""
    command = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")(command)


def results_console() -> Console:
    """For what was asked: stdout. NO_COLOR is honoured; a pipe gets plain text, wide enough to stay readable."""
    return _console(stderr=False)


def status_console() -> Console:
    """For what is going on meanwhile: stderr, so that a pipe gets the results only."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    piped = not stream.isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, highlight=False, width=PIPE_WIDTH if piped else None)


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
