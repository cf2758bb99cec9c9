"""Whether a piece of the program is being run once more, only to look at it: who counts steps leaves it out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["rerun", "running"]

_depth = 0


@contextmanager
def rerun() -> Iterator[None]:
    """Around what is run once more.

    >>> with rerun():
    ...     running()
    True
    >>> running()
    False
    """
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def running() -> bool:
    """True inside of `rerun`."""
    return _depth > 0
