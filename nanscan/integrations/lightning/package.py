"""The two names that Lightning is installed by, and the base classes that satisfy both."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from nanscan import messages
from nanscan.integrations.versions import require

__all__ = ["callback_bases"]

_NAMES = ("lightning", "pytorch_lightning")
MINIMUM, BELOW = "2.4", "2.7"


def callback_bases() -> tuple[Any, ...]:
    """The classes that a callback is to be derived from.

    `lightning` and `pytorch_lightning` are two copies of one package, each with a `Callback` of its own that its
    Trainer insists on. Whichever the program has imported by now counts, both if it has both; if it has none, the first
    that is installed is imported.
    """
    used = [name for name in _NAMES if name in sys.modules]
    if not used:
        used = [next((name for name in _NAMES if find_spec(name)), _NAMES[0])]
    packages = [require(name, MINIMUM, BELOW, extra="lightning") for name in used]
    messages.point_past(*packages, *(sys.modules[name] for name in ("lightning_fabric",) if name in sys.modules))
    return tuple(map(_callback_of, packages))


def _callback_of(package: Any) -> Any:
    return package.pytorch.Callback if package.__name__ == "lightning" else package.Callback
