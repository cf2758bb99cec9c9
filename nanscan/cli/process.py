"""One command from start to exit code: its streams, its interruption, and how every error ends in one line."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import click

from nanscan.cli.app import app
from nanscan.cli.output import print_json, printable
from nanscan.config import load_config
from nanscan.errors import EngineError

__all__ = ["run"]

EXIT_MISUSE = 2
EXIT_INTERNAL = 70  # sysexits.h: EX_SOFTWARE
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_PIPE = 141  # 128 + SIGPIPE
COMPLETION = "_NANSCAN_COMPLETE"  # set by the completion scripts: what follows is a question of the shell
PATIENCE = 1.0  # seconds in which a second Ctrl-C does not disturb the cleaning up after the first


def run(argv: Sequence[str] | None) -> int:
    """Run one command; returns its exit code, whatever happens. Without ``argv`` it is this process's own command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if os.environ.get(COMPLETION):
        return _complete()
    if argv is not None:
        return _run(arguments, _Interrupts())
    _open_streams()
    interrupts = _Interrupts()
    interrupts.install()
    with _warnings_in_one_line():
        code = _run(arguments, interrupts)
    interrupts.remove()
    _leave_threads(code)
    return code


def _run(arguments: list[str], interrupts: _Interrupts) -> int:
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
        interrupts.over = True
        return code
    except BaseException as error:
        interrupts.over = True
        return _end(error, arguments, interrupts.pressed)


def _invoke(arguments: list[str]) -> int:
    try:
        with app.make_context("nanscan", list(arguments)) as context:
            return int(app.invoke(context) or 0)
    except click.exceptions.Exit as done:
        return done.exit_code


def _leave_threads(code: int) -> None:
    """Don't wait for threads that an imported module of the user started: the answer is given."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if any(not thread.daemon for thread in others):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _complete() -> int:
    """Answer the shell; in the midst of a command line nothing else may appear."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            app.main(prog_name="nanscan", complete_var=COMPLETION)
        except SystemExit as done:
            return int(done.code or 0)
        except BaseException:
            return 1


def _open_streams() -> None:
    """Stand in for streams that are closed, and let no character stop a text on its way out."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        line = " ".join(str(message).split())
        own = line.startswith("nanscan: ")
        click.echo(printable(line if own else f"nanscan: {category.__name__}: {line}"), err=True)

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


class _Interrupts:
    """Notes Ctrl-C: a library may make an error of its own of it, which is none.

    Attributes:
        pressed: when, in seconds of `time.monotonic`; None: not yet.
        over: there is nothing left to stop; Ctrl-C ends the process as if nobody listened, without a traceback.
    """

    def __init__(self) -> None:
        self.pressed: float | None = None
        self.over = False

    def install(self) -> None:
        """Unless whoever started this process wants it to ignore Ctrl-C."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._take)

    def remove(self) -> None:
        """The command is over; while Python ends, Ctrl-C has nothing to say any more."""
        if signal.getsignal(signal.SIGINT) == self._take:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _take(self, *_: object) -> None:
        now = time.monotonic()
        if self.pressed is None and not self.over:
            self.pressed = now
            raise KeyboardInterrupt
        if self.pressed is None or now - self.pressed > PATIENCE:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)


def _end(error: BaseException, arguments: list[str], pressed: float | None) -> int:
    """Say what went wrong in one line, after the traceback if that was asked for."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)) or pressed is not None:
        # Python ends by SIGINT if the interrupt came while a text was executed (as dataclasses do), caught or not,
        # unless a text is executed afterwards.
        exec("")
        return _fail("stopped", EXIT_INTERRUPTED, arguments)
    if isinstance(error, BrokenPipeError) or isinstance(
        error.__context__, BrokenPipeError
    ):  # rich makes SystemExit of it
        _discard_output()
        return EXIT_PIPE
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return EXIT_MISUSE
    debug = _wants_debug(arguments)
    if debug:
        traceback.print_exception(error)
    message, code = _explained(error, arguments)
    if code == EXIT_INTERNAL and not debug:
        message += "; run it again with --debug for the traceback, and report it with that and `nanscan env`"
    return _fail(message, code, arguments)


def _explained(error: BaseException, arguments: list[str]) -> tuple[str, int]:
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx is not None else "nanscan"
        return f"{error.format_message()} {_about_dashes(error, arguments)}See: {path} --help", EXIT_MISUSE
    if isinstance(error, click.ClickException):
        return error.format_message(), EXIT_MISUSE
    if isinstance(error, OSError):
        where = f"'{error.filename}': " if error.filename is not None else ""
        return f"{where}{error.strerror or error} (check the path, and that it can be written)", EXIT_MISUSE
    if isinstance(error, EngineError) or _lacks_an_extra(error):
        return str(error), EXIT_MISUSE
    return f"internal error: {type(error).__name__}: {error}", EXIT_INTERNAL


def _about_dashes(error: click.UsageError, arguments: list[str]) -> str:
    """The way out for files whose name looks like an option."""
    if not isinstance(error, click.NoSuchOption):
        return ""
    files = [argument for argument in arguments if argument.startswith("-") and os.path.lexists(argument)]
    return f"The file of that name is ./{files[0]} here. " if files else ""


def _lacks_an_extra(error: BaseException) -> bool:
    demo_data = sys.modules.get("nanscan.demo.data")  # its message says how to install it
    return demo_data is not None and isinstance(error, demo_data.MissingExtra)


def _options(arguments: list[str]) -> list[str]:
    """What can be an option: all before ``--``."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _wants_debug(arguments: list[str]) -> bool:
    try:
        return "--debug" in _options(arguments) or load_config().debug
    except ValueError:  # what the error is about
        return False


def _fail(message: str, code: int, arguments: list[str]) -> int:
    line = printable(" ".join(message.split()))
    try:
        if "--json" in _options(arguments):
            print_json({"error": line, "exit_code": code})
        sys.stdout.flush()
    except (OSError, ValueError):
        _discard_output()
    with contextlib.suppress(OSError, ValueError):
        click.echo(f"nanscan: {line}", err=True)
    return code


def _discard_output() -> None:
    """What is left in the buffer has nowhere to go, and Python would complain of it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
