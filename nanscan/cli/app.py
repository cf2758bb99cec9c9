"""The command itself: its verbs, its exit codes, and how every error ends in one line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import click

from nanscan._version import __version__
from nanscan.cli import bench, demo, env, pickle, report, scan
from nanscan.cli.output import print_json
from nanscan.config import load_config

__all__ = ["main"]

EXIT_MISUSE = 2
EXIT_INTERNAL = 70  # sysexits.h: EX_SOFTWARE
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_PIPE = 141  # 128 + SIGPIPE

EPILOG = """\b
Exit code: 0 clean, 1 something found, 2 misuse (the message says what to do).
Every verb takes --json (one JSON document on stdout) and --debug (tracebacks)."""


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="nanscan", message="%(prog)s %(version)s")
def app() -> None:
    """Keep PyTorch training alive: find NaN and Inf in one pass, name them, skip or clip the step."""
    try:
        load_config()
    except ValueError as error:  # a NANSCAN_* variable; the message names its valid values
        raise click.ClickException(str(error)) from error


for verb in (demo.command, env.command, scan.command, pickle.command, report.command, bench.command):
    app.add_command(verb)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; default: those of this process.

    Returns:
        The exit code: 0 clean, 1 something found, 2 misuse, 70 a defect in nanscan, 130 interrupted.

    >>> main(["--version"])
    nanscan 0.1.0
    0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = app.main(arguments, prog_name="nanscan", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_MISUSE
    except (click.Abort, KeyboardInterrupt):
        # Python ends by SIGINT if the interrupt came while a text was executed (as dataclasses do), caught or not,
        # unless a text is executed afterwards.
        exec("")
        return _fail("stopped", EXIT_INTERRUPTED, arguments)
    except (BrokenPipeError, SystemExit):  # rich makes the second of the first, and nothing else here raises it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at exit
        return EXIT_PIPE
    except Exception as error:
        return _report(error, arguments)


def _report(error: Exception, arguments: list[str]) -> int:
    """Say what went wrong in one line, after the traceback if that was asked for."""
    if "--debug" in arguments:
        traceback.print_exc()
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx is not None else "nanscan"
        return _fail(f"{error.format_message()} See: {path} --help", EXIT_MISUSE, arguments)
    if isinstance(error, click.ClickException):
        return _fail(error.format_message(), EXIT_MISUSE, arguments)
    if isinstance(error, OSError):
        return _fail(f"{error} (check the path, and that it can be written)", EXIT_MISUSE, arguments)
    if _is_foreseen(error):
        return _fail(str(error), EXIT_MISUSE, arguments)
    kind = type(error).__name__
    hint = "" if "--debug" in arguments else "; run it again with --debug for the traceback"
    return _fail(f"internal error: {kind}: {error}{hint}", EXIT_INTERNAL, arguments)


def _is_foreseen(error: Exception) -> bool:
    """True for errors that the user can mend, whose message already says how."""
    from nanscan.demo.data import MissingExtra
    from nanscan.errors import EngineError

    return isinstance(error, (EngineError, MissingExtra))


def _fail(message: str, code: int, arguments: list[str]) -> int:
    line = " ".join(message.split())
    if "--json" in arguments:
        print_json({"error": line, "exit_code": code})
    click.echo(f"nanscan: {line}", err=True)
    return code
