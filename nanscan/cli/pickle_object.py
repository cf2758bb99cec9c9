"""`nanscan pickle MODULE:OBJECT`: the object is imported and every place that does not survive pickling is listed."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

import click

from nanscan.cli.output import object_prints_to_stderr, print_json, print_lines, printable
from nanscan.cli.progress import working

__all__ = ["look_at"]

ATTRIBUTES = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def look_at(target: str, options: dict[str, bool], as_json: bool) -> int:
    """Import ``module:object``, look at it and print what was found; returns the exit code.

    Args:
        target: such as ``train:model``.
        options: of `find_unpicklable`.
        as_json: print a document instead of lines.
    """
    with working(f"looking at {target}"), object_prints_to_stderr():
        value = _imported(target)
        from nanscan.pickling import find_unpicklable

        problems = find_unpicklable(value, name=target.partition(":")[2], **options)
    if as_json:
        listed = [problem.to_dict() for problem in problems]
        print_json({"object": target, "exit_code": int(bool(problems)), "problems": listed})
    else:
        print_lines([f"{target}: {len(problems)} found" if problems else f"{target}: it pickles and loads"])
        print_lines(f"  {problem.describe()}" for problem in problems)
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
        value: Any = importlib.import_module(module_name)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise click.ClickException(_import_failed(module_name, attributes, error)) from error
    for count, part in enumerate(attributes.split(".")):
        owner = ".".join([module_name, *attributes.split(".")[:count]])
        try:
            value = getattr(value, part)
        except AttributeError as error:
            raise click.ClickException(f"'{owner}' has no '{part}': {_offer(value)}") from error
        except Exception as error:  # of the user's own code
            why = f"{type(error).__name__}: {error}"
            raise click.ClickException(f"'{owner}' can't give its '{part}': {why}") from error
    return value


def _import_failed(module: str, attributes: str, error: BaseException) -> str:
    missing = isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}.")
    if missing and module.endswith(".py"):
        return f"there is no module '{module}': write {module[:-3]}:{attributes}"
    if missing:
        return f"there is no module '{module}' in {os.getcwd()} or on sys.path, and no such file"
    return f"the module '{module}' can't be imported: {type(error).__name__}: {error}"


def _offer(value: Any) -> str:
    names = [name for name in vars(value) if not name.startswith("_")] if hasattr(value, "__dict__") else []
    return f"it has {', '.join(names[:12])}{' …' if names[12:] else ''}" if names else "it has no public names"
