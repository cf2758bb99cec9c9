"""The two names that Lightning is installed by, and the base class that satisfies both."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from nanscan.integrations.versions import require

__all__ = ["callback_base"]

_NAMES = ("lightning", "pytorch_lightning")
MINIMUM, BELOW = "2.4", "2.7"


def callback_base() -> Any:
    """The class that a callback is to be derived from.

    `lightning` and `pytorch_lightning` are two copies of one package, each with a `Callback` of its own. Whichever the
    program has imported by now counts, both if it has both; none is imported besides that but the first one installed.
    """
    used = [name for name in _NAMES if name in sys.modules]
    if not used:
        used = [next((name for name in _NAMES if find_spec(name)), _NAMES[0])]
    bases = tuple(_of(require(name, MINIMUM, BELOW, extra="lightning")) for name in used)
    return bases[0] if len(bases) == 1 else type("Callback", bases, {})


def _of(package: Any) -> Any:
    return package.pytorch.Callback if package.__name__ == "lightning" else package.Callback
