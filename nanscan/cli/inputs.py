"""Which paths a verb reads: a device never ends, and a pipe without a writer is waited for."""

from __future__ import annotations

import stat
from pathlib import Path

import click

from nanscan.cli.output import printable

__all__ = ["refuse_irregular"]

KINDS = {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a named pipe"}
OF_SHELL = ("/dev/", "/proc/")  # a pipe there has a writer: `<(zcat run.jsonl.gz)`, /dev/stdin


def refuse_irregular(path: Path, give: str) -> None:
    """Refuse devices, sockets and pipes that lie in a folder; what is not there is another's business.

    Args:
        path: what was given.
        give: what to give, such as "a log".

    Raises:
        ClickException: it is one of them.

    >>> refuse_irregular(Path("/dev/zero"), "a log")
    Traceback (most recent call last):
    click.exceptions.ClickException: '/dev/zero' is a device, not a regular file: give a log
    """
    if not path.exists():
        return
    kind = KINDS.get(stat.S_IFMT(path.stat().st_mode))
    if kind is None or (kind == "a named pipe" and str(path).startswith(OF_SHELL)):
        return
    raise click.ClickException(f"'{printable(str(path))}' is {kind}, not a regular file: give {give}")
