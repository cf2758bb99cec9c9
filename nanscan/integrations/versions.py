"""Whether an optional package is there, and of a version that its integration was made for."""

from __future__ import annotations

import importlib
import re
from typing import Any

from nanscan import messages

__all__ = ["require"]

_warned: set[str] = set()


def require(package: str, minimum: str, below: str | None = None, *, extra: str) -> Any:
    """Import an optional package, or say how to get it.

    Args:
        package: the name it is imported by.
        minimum: the oldest version that works, such as `"2.3"`.
        below: the first version that was not tested, such as `"3"`; from there on it is used with a warning. None:
            no such limit.
        extra: the extra of nanscan that installs it.

    Returns:
        The imported module.

    Raises:
        ImportError: it is not installed, or older than `minimum`.

    >>> require("no_such_package", "1.0", extra="lightning")
    Traceback (most recent call last):
    ...
    ImportError: nanscan's integration needs no_such_package >= 1.0, which is not installed: pip install ...
    """
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(
            f"nanscan's integration needs {package} >= {minimum}, which is not installed: "
            f"pip install 'nanscan[{extra}]'"
        ) from error
    version = str(getattr(module, "__version__", "0"))
    if _numbers(version) < _numbers(minimum):
        raise ImportError(
            f"nanscan's integration needs {package} >= {minimum}, version {version} is installed: "
            f"pip install --upgrade 'nanscan[{extra}]'"
        )
    if below is not None and _numbers(version) >= _numbers(below) and package not in _warned:
        _warned.add(package)
        messages.warn(
            f"nanscan was tested with {package} >= {minimum}, < {below}; {version} is installed. If its trainer "
            f"misbehaves, try pip install '{package}<{below}'",
            UserWarning,
        )
    return module


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version: `"2.6.0rc1"` → (2, 6, 0).

    >>> _numbers("2.6.0rc1"), _numbers("3") > _numbers("2.14.1")
    ((2, 6, 0), True)
    """
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in release.group().split(".")) if release else (0,)
