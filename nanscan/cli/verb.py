"""How a verb's help looks: text, options, examples, exit codes, on one screen of 80 columns and 24 lines."""

from __future__ import annotations

import difflib
from typing import Any

import click

__all__ = ["CONTEXT", "FileName", "Verb", "Verbs"]

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
MORE = "More: docs/command_line.md"


class FileName(click.Path):
    """A path; an empty name, as an unset variable of a shell leaves it, is not the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if not str(value):
            self.fail("an empty name.", param, ctx)
        return super().convert(value, param, ctx)


class Verb(click.Command):
    """A command whose help ends with examples and exit codes.

    Args:
        examples: what one would type -> what it is for.
        exits: what the exit codes mean.
    """

    def __init__(self, *args: Any, examples: dict[str, str], exits: str, **others: Any) -> None:
        super().__init__(*args, **others)
        self.examples = examples
        self.exits = exits

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples and the exit codes."""
        with formatter.section("Examples"):
            formatter.write_dl(list(self.examples.items()), col_max=50)
        formatter.write_paragraph()
        formatter.write_text(f"Exit code: {self.exits} {MORE}")


class Verbs(click.Group):
    """The verbs, in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that is meant; a mistyped one is answered with its neighbour."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            raise click.UsageError(unknown(args[0], self), ctx)
        return super().resolve_command(ctx, args)


def unknown(name: str, verbs: click.Group) -> str:
    """What to say of a verb that there isn't.

    >>> unknown("scna", Verbs(commands={"scan": click.Command("scan")}))
    "No such command 'scna'. Did you mean 'scan'?"
    """
    near = difflib.get_close_matches(name, verbs.commands, n=1, cutoff=0.5)
    offer = f"Did you mean '{near[0]}'?" if near else f"There are {', '.join(verbs.commands)}."
    return f"No such command '{name}'. {offer}"
