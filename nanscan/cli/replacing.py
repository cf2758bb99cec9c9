"""Output files appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import click

from nanscan.checkpoint.atomic import replacing, target_of
from nanscan.cli.output import printable

__all__ = ["replaced"]


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a path to write to; what is written there takes the place of ``path`` when the block ends without error.

    A device or pipe, such as /dev/stdout, is written to as it is.

    Raises:
        ClickException: it can't be written; the message says why.
    """
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        with replacing(target_of(str(path))) as new:
            yield Path(new.path)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        why = error.strerror or str(error)
        raise click.ClickException(
            f"'{printable(str(path))}' can't be written: {why} (check the path and the space on the disk)"
        ) from error
