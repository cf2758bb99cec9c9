"""`nanscan pickle FILE` and `nanscan pickle package.module:object`: what pickling does, without running a pickle."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanscan.cli.inputs import refuse_irregular
from nanscan.cli.output import common_options, plural, print_json, print_lines, printable
from nanscan.cli.progress import working
from nanscan.cli.verb import FileName, Verb
from nanscan.foreign_files import kind_of_folder
from nanscan.tables import print_table, show_bytes

if TYPE_CHECKING:
    from nanscan.pickling.stream import GlobalUse, PickleContents

OBJECT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:.*", re.DOTALL)
COLUMNS = ("global", "when loaded", "count", "first at")


@click.command(
    "pickle",
    cls=Verb,
    short_help="Look into a pickle without running it, or at an object.",
    examples={
        "nanscan pickle model.pt": "what loading it would import and run",
        "nanscan pickle train:model": "why an object can't be pickled",
    },
    exits="0 clean; 1 something is refused, would run code, is damaged or does not survive; 2 misuse.",
)
@click.argument("target", type=FileName(), metavar="FILE|MODULE:OBJECT")
@click.option("--for-process", is_flag=True, help="OBJECT: judge by what a started process gets (spawn).")
@click.option("--weights-only", is_flag=True, help="OBJECT: as torch.load(weights_only=True), too.")
@click.option("--no-loading", is_flag=True, help="OBJECT: do not prove in a process that it loads.")
@common_options
def command(target: str, for_process: bool, weights_only: bool, no_loading: bool, as_json: bool) -> int:
    """Say what is in a pickle or torch file, or what is wrong with an object.

    FILE: which globals it imports, which torch.load(weights_only=True) refuses, which would run code. Nothing of it
    is run. MODULE:OBJECT, such as train:model: the module is imported, from the working folder too, and each place
    that does not survive pickling is listed, with a fix.
    """
    if not os.path.lexists(target) and OBJECT.fullmatch(target):
        from nanscan.cli.pickle_object import look_at

        options = {"for_process": for_process, "weights_only": weights_only, "check_loading": not no_loading}
        return look_at(target, options, as_json)
    for name, given in (("--for-process", for_process), ("--weights-only", weights_only), ("--no-loading", no_loading)):
        if given:
            raise click.UsageError(f"{name} is about MODULE:OBJECT, and '{printable(target)}' is a file.")
    return _file(Path(target), as_json)


def _file(path: Path, as_json: bool) -> int:
    with working("importing PyTorch"):
        from nanscan.pickling.stream import NotAPickle, inspect_pickle

    if path.is_dir():
        what = kind_of_folder(path)
        raise click.ClickException(
            f"'{printable(str(path))}' is {what}" if what else f"'{printable(str(path))}' is a folder: give a file"
        )
    if path.suffix == ".py" and path.is_file():
        name = printable(path.stem)
        raise click.ClickException(
            f"'{printable(str(path))}' is Python source: for an object of it, write {name}:OBJECT"
        )
    refuse_irregular(path, "a file")
    try:
        with working(f"looking into {path.name} ({show_bytes(path.stat().st_size)})"):
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
    print_lines([f"{path}: {_summary(contents)}", f"  {_verdict(contents)}"])
    print_lines(f"  note: {note}" for note in contents.notes)
    if contents.error:
        print_lines([f"  damaged: {contents.error}"])
    if contents.opcodes and contents.kind != "pickle":
        print_lines([f"  refused opcodes: {', '.join(contents.opcodes)}"])
    if contents.globals:
        rows = [_row(use) for use in contents.globals]
        print_table(COLUMNS, rows, sys.stdout, text_columns=(0, 1, 3), style=_style)


def _summary(contents: PickleContents) -> str:
    protocols = "/".join(map(str, contents.protocols)) or "?"
    nested = f" + {contents.nested} in byte strings" if contents.nested else ""
    tensors = f"{plural(contents.tensors, 'tensor')} ({contents.tensor_bytes:,} bytes)"
    ids = f", {plural(contents.persistent_ids, 'persistent id')}" if contents.persistent_ids else ""
    return f"{contents.kind}, protocol {protocols}, {plural(contents.pickles, 'pickle')}{nested}, {tensors}{ids}"


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
    return tuple(printable(cell) for cell in (use.path, verdict, f"{use.count:,}", use.place))


def _style(row: Sequence[str]) -> str:
    return "bold red" if row[1].startswith("would") else "yellow" if row[1].startswith("refused") else ""
