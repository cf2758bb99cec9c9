"""Which format a file has, by its suffix; `None` is torch's own."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

__all__ = ["Format", "format_of"]

_MODULES = {
    ".safetensors": "nanscan.checkpoint.safetensors_file",
    ".h5": "nanscan.checkpoint.hdf5_file",
    ".hdf5": "nanscan.checkpoint.hdf5_file",
}


class Format(Protocol):
    """What another format than torch's offers."""

    def prepare(self, obj: Any, path: str) -> None:
        """Raise if the format can't hold ``obj``, or its library is missing."""

    def write(self, obj: Any, temporary: str) -> None:
        """Write ``obj`` with digests into the file that is at ``temporary``."""

    def check(self, fd: int, path: str) -> None:
        """Compare every byte of the file with its digests; raises `CorruptCheckpoint`."""

    def read(self, path: str, fd: int, map_location: Any, verify: bool) -> Any:
        """Read what was written."""


def format_of(path: str) -> Format | None:
    """The format that the suffix of ``path`` stands for."""
    for suffix, module in _MODULES.items():
        if path.lower().endswith(suffix):
            found: Format = importlib.import_module(module).FORMAT
            return found
    return None
