"""Paths that the system would take for folders of that name: `~`, which only a shell replaces, and URLs."""

from __future__ import annotations

import os
import re

__all__ = ["refuse_other_places"]

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)  # pathlib makes one slash of two


def refuse_other_places(path: str | os.PathLike[str], what: str) -> None:
    """Refuse what would silently become a folder called `~` or `s3:` here, unless there is such a folder.

    Args:
        path: as the user gave it.
        what: its name for the message, `"path"` say.

    Raises:
        ValueError: it begins with `~` or is a URL.

    >>> refuse_other_places("s3://bucket/last.pt", "path")
    Traceback (most recent call last):
        ...
    ValueError: path is 's3://bucket/last.pt', a URL, and only local files are read and written: use a local path, and \
copy the file to or from there with that storage's own tool
    """
    name = os.fsdecode(path)
    first = name.replace(os.sep, "/").partition("/")[0]
    if os.path.lexists(first):
        return
    if first.startswith("~") and os.path.expanduser(first) != first:
        raise ValueError(
            f"{what} is {name!r}: ~ means a home folder in a shell only, and a folder called {first!r} would be made "
            f"here; give os.path.expanduser({name!r})"
        )
    if _URL.match(name) and len(first) > 2:  # a drive letter is no scheme
        raise ValueError(
            f"{what} is {name!r}, a URL, and only local files are read and written: use a local path, and copy the "
            "file to or from there with that storage's own tool"
        )
