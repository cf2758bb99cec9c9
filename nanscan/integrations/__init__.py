"""nanscan in other people's trainers and frameworks; each module here needs its own package, imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["accelerate", "lightning", "paddle", "tensorboard", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"nanscan.integrations.{name}")
    raise AttributeError(f"module 'nanscan.integrations' has no attribute {name!r}; there are: {', '.join(__all__)}")
