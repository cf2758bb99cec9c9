"""`nanscan completion SHELL`: the script that makes Tab complete verbs, options and files."""

from __future__ import annotations

import contextlib
import io

import click

from nanscan.cli.output import common_options, print_json
from nanscan.cli.verb import Verb

SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion",
    cls=Verb,
    short_help="Print what makes Tab complete in bash, zsh or fish.",
    examples={
        'eval "$(nanscan completion bash)"': "into ~/.bashrc",
        'eval "$(nanscan completion zsh)"': "into ~/.zshrc, after compinit",
        "nanscan completion fish | source": "into ~/.config/fish/config.fish",
    },
    exits="0.",
)
@click.argument("shell", type=click.Choice(SHELLS), metavar="bash|zsh|fish")
@common_options
def command(shell: str, as_json: bool) -> int:
    """Print a script for the shell to run: then Tab completes commands, options, values and files."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    with contextlib.redirect_stderr(io.StringIO()):  # click looks for a bash of this machine, which need not be there
        script = kind(click.get_current_context().find_root().command, {}, "nanscan", "_NANSCAN_COMPLETE").source()
    if as_json:
        print_json({"exit_code": 0, "shell": shell, "script": script})
    else:
        click.echo(script)
    return 0
