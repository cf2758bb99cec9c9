"""`nanscan help [COMMAND]`: the same as `nanscan COMMAND --help`."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

from nanscan.cli.output import common_options, print_json
from nanscan.cli.verb import Verb, unknown


def _names(ctx: click.Context, param: Any, incomplete: str) -> list[CompletionItem]:
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    return [CompletionItem(name) for name in group.commands if name.startswith(incomplete)]


@click.command(
    "help",
    cls=Verb,
    short_help="Show the help of a command.",
    examples={"nanscan help": "all commands", "nanscan help scan": "one of them"},
    exits="0, or 2 if there is no such command.",
)
@click.argument("name", metavar="[COMMAND]", required=False, shell_complete=_names)
@common_options
def command(name: str | None, as_json: bool) -> int:
    """Show what a command does, its options, examples and exit codes."""
    root = click.get_current_context().find_root()
    assert isinstance(root.command, click.Group)
    if name is None:
        text = root.get_help()
    elif name in root.command.commands:
        verb = root.command.commands[name]
        text = verb.get_help(click.Context(verb, info_name=name, parent=root))
    else:
        raise click.UsageError(unknown(name, root.command))
    if as_json:
        print_json({"exit_code": 0, "command": name, "help": text})
    else:
        click.echo(text)
    return 0
