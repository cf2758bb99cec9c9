"""The command `nanscan` and its verbs."""

from __future__ import annotations

import click

from nanscan._version import __version__
from nanscan.cli import bench, completion, demo, env, help, pickle, report, scan
from nanscan.cli.output import json_for_all
from nanscan.cli.verb import CONTEXT, Verbs
from nanscan.config import load_config

__all__ = ["app"]

EPILOG = """\b
Exit code: 0 clean, 1 something found, 2 misuse (the message says what to do).
More: nanscan COMMAND --help, docs/command_line.md"""


@click.group(cls=Verbs, epilog=EPILOG, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="nanscan", message="%(prog)s %(version)s")
@click.option(
    "--json",
    is_flag=True,
    expose_value=False,
    callback=json_for_all,
    help="Print one JSON document and nothing else, whatever the command.",
)
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error (or NANSCAN_DEBUG=1).")
def app() -> None:
    """Keep PyTorch training alive: find NaN and Inf, name them, skip or clip the step."""
    try:
        load_config()
    except ValueError as error:  # a NANSCAN_* variable; the message names its valid values
        raise click.ClickException(str(error)) from error


for verb in (demo, scan, pickle, report, bench, env, completion, help):
    app.add_command(verb.command)
