"""The command line: the verbs of `nanscan`, each in a module of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["main"]


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
    try:
        from nanscan.cli.process import run  # here, so that Ctrl-C ends it cleanly while it is imported, too
    except KeyboardInterrupt:
        os.write(2, b"nanscan: stopped\n")
        return 130
    return run(argv)
