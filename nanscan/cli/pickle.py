"""`nanscan pickle FILE` and `nanscan pickle package.module:object`: what pickling does, without running a pickle."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

from nanscan.cli.output import common_options, print_json, results_console
from nanscan.cli.scan import printable

if TYPE_CHECKING:
    from nanscan.pickling.problem import PickleProblem
    from nanscan.pickling.stream import GlobalUse, PickleContents

OBJECT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:.*", re.DOTALL)
ATTRIBUTES = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
COLUMNS = ("count", "global", "when loaded", "first at")

EPILOG = """\b
Exit code: 0 clean; 1 a global that torch.load(weights_only=True) refuses or that
would run code, a damaged file, an object that does not survive pickling;
2 misuse: the file, module or attribute isn't there, or the file is no pickle."""


@click.command("pickle", short_help="Look into a pickle without running it, or at an object.", epilog=EPILOG)
@click.argument("target", metavar="FILE|MODULE:OBJECT")
@click.option("--for-process", is_flag=True, help="OBJECT: judge by what a started process gets (spawn).")
@click.option("--weights-only", is_flag=True, help="OBJECT: list what torch.load(weights_only=True) refuses, too.")
@click.option("--no-loading", is_flag=True, help="OBJECT: do not prove in a process of its own that it loads.")
@common_options
def command(target: str, for_process: bool, weights_only: bool, no_loading: bool, as_json: bool) -> int:
    """Say what is in a pickle or torch file, or what is wrong with pickling an object.

    FILE: which globals it imports, which of them torch.load(weights_only=True) refuses, which would run code when
    loaded; its tensors. Nothing of it is run and nothing it names is imported.

    MODULE:OBJECT, such as train:model, is imported (which runs that module, found from the working folder too);
    every place that does not survive pickling is listed, with the reason and a fix.
    """
    if not os.path.lexists(target) and OBJECT.fullmatch(target):
        options = {"for_process": for_process, "weights_only": weights_only, "check_loading": not no_loading}
        return _object(target, options, as_json)
    for name, given in (("--for-process", for_process), ("--weights-only", weights_only), ("--no-loading", no_loading)):
        if given:
            raise click.UsageError(f"{name} is about MODULE:OBJECT, and '{printable(target)}' is a file.")
    return _file(Path(target), as_json)


def _file(path: Path, as_json: bool) -> int:
    from nanscan.pickling.stream import NotAPickle, inspect_pickle

    if path.is_dir():
        raise click.ClickException(f"'{printable(str(path))}' is a folder: give a file")
    try:
        contents = inspect_pickle(path)
    except FileNotFoundError as error:
        raise click.ClickException(
            f"'{printable(str(path))}' is not there: give a file, or an object as package.module:object"
        ) from error
    except NotAPickle as error:
        raise click.ClickException(f"'{printable(str(path))}' can't be looked into: {error}") from error
    code = 0 if contents.clean else 1
    if as_json:
        print_json({"path": str(path), "exit_code": code, "verdict": _verdict(contents), **contents.to_dict()})
    else:
        _print_file(path, contents)
    return code


def _print_file(path: Path, contents: PickleContents) -> None:
    console = results_console()
    lines = [
        f"{path}: {_summary(contents)}",
        f"  {_verdict(contents)}",
        *(f"  note: {note}" for note in contents.notes),
    ]
    if contents.error:
        lines.append(f"  damaged: {contents.error}")
    if contents.opcodes and contents.kind != "pickle":
        lines.append(f"  refused opcodes: {', '.join(contents.opcodes)}")
    for line in lines:
        console.print(printable(line, limit=2000), markup=False, soft_wrap=True)
    if not contents.globals:
        return
    rows = [_row(use) for use in contents.globals]
    if console.is_terminal:
        console.print(_table(rows))
        return
    for row in _aligned([COLUMNS, *rows]):
        console.print(row, markup=False, soft_wrap=True)


def _summary(contents: PickleContents) -> str:
    protocols = "/".join(map(str, contents.protocols)) or "?"
    nested = f" + {contents.nested} in byte strings" if contents.nested else ""
    tensors = f"{_plural(contents.tensors, 'tensor')} ({contents.tensor_bytes:,} bytes)"
    ids = f", {_plural(contents.persistent_ids, 'persistent id')}" if contents.persistent_ids else ""
    return f"{contents.kind}, protocol {protocols}, {_plural(contents.pickles, 'pickle')}{nested}, {tensors}{ids}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _verdict(contents: PickleContents) -> str:
    if contents.dangerous:
        names = ", ".join(use.path for use in contents.dangerous[:3]) + (" …" if len(contents.dangerous) > 3 else "")
        return f"would run code when loaded: {names}; load it with weights_only=True, if at all"
    if contents.refused:
        return f"torch.load(weights_only=True) refuses {len(contents.refused)} of its {len(contents.globals)} globals"
    if not contents.clean:
        return "torch.load(weights_only=True) refuses it"
    return "clean: torch.load(weights_only=True) has no reason to refuse it"


def _row(use: GlobalUse) -> tuple[str, ...]:
    refused = "allowed by weights_only" if use.allowed else "refused by weights_only"
    verdict = f"would run code: {use.danger}" if use.danger else refused
    return tuple(printable(cell) for cell in (str(use.count), use.path, verdict, use.place))


def _table(rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    for name in COLUMNS:
        table.add_column(name, justify="right" if name == "count" else "left", overflow="fold")
    for row in rows:
        style = "bold red" if row[2].startswith("would") else "yellow" if row[2].startswith("refused") else ""
        table.add_row(*(Text(cell) for cell in row), style=style)
    return table


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Plain text whose columns a pipe can search: no name is cut or folded."""
    widths = [min(70, max(len(row[column]) for row in rows)) for column in range(len(COLUMNS))]
    cells = (zip(row, widths, strict=True) for row in rows)
    return ["  " + "  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in cells]


def _object(target: str, options: dict[str, bool], as_json: bool) -> int:
    from nanscan.pickling import find_unpicklable

    value = _imported(target)
    name = target.partition(":")[2]
    with contextlib.redirect_stdout(sys.stderr):  # what the object's own code prints is no part of the answer
        problems = find_unpicklable(value, name=name, **options)
    if as_json:
        listed = [problem.to_dict() for problem in problems]
        print_json({"object": target, "exit_code": int(bool(problems)), "problems": listed})
    else:
        _print_problems(target, problems)
    return int(bool(problems))


def _imported(target: str) -> Any:
    module_name, _, attributes = target.partition(":")
    if not ATTRIBUTES.fullmatch(attributes):
        call = " Nothing is called: assign the result to a name there." if attributes.endswith(")") else ""
        raise click.ClickException(
            f"'{printable(target)}' names no object: write package.module:object, such as train:model.{call}"
        )
    sys.path.insert(0, os.getcwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            value: Any = importlib.import_module(module_name)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise click.ClickException(_import_failed(module_name, error)) from error
    for count, part in enumerate(attributes.split(".")):
        if not hasattr(value, part):
            owner = ".".join([module_name, *attributes.split(".")[:count]])
            raise click.ClickException(f"'{owner}' has no '{part}': {_offer(value)}")
        value = getattr(value, part)
    return value


def _import_failed(module: str, error: BaseException) -> str:
    missing = isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}.")
    if missing:
        return f"there is no module '{module}' in {os.getcwd()} or on sys.path, and no such file"
    return f"the module '{module}' can't be imported: {type(error).__name__}: {error}"


def _offer(value: Any) -> str:
    names = [name for name in vars(value) if not name.startswith("_")] if hasattr(value, "__dict__") else []
    return f"it has {', '.join(names[:12])}{' …' if names[12:] else ''}" if names else "it has no public names"


def _print_problems(target: str, problems: list[PickleProblem]) -> None:
    console = results_console()
    if not problems:
        console.print(f"{printable(target)}: it pickles and loads", markup=False, soft_wrap=True)
        return
    console.print(f"{printable(target)}: {len(problems)} found", markup=False, soft_wrap=True)
    for problem in problems:
        console.print(Text(printable(f"  {problem.describe()}", limit=4000)), soft_wrap=True)
