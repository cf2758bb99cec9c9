"""Which format a file has, by its suffix; `None` is torch's own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from nanscan.checkpoint.tensors import Found

__all__ = ["Format", "format_of"]

_MODULES = {
    ".safetensors": "nanscan.checkpoint.safetensors_file",
    ".h5": "nanscan.checkpoint.hdf5_file",
    ".hdf5": "nanscan.checkpoint.hdf5_file",
    ".pdparams": "nanscan.checkpoint.paddle_file",
    ".pdopt": "nanscan.checkpoint.paddle_file",
    ".pdstates": "nanscan.checkpoint.paddle_file",
    ".pdtensors": "nanscan.checkpoint.paddle_file",
}


class Format(Protocol):
    """What another format than torch's offers."""

    holds_paddle: bool  # whether it is the format for Paddle's tensors

    def prepare(self, obj: Any, path: str) -> Sequence[Found]:
        """Raise if the format can't hold ``obj``, or its library is missing.

        Returns:
            What is stored as tensors are, and is to be looked at for NaN and Inf too.
        """

    def write(self, obj: Any, temporary: str) -> None:
        """Write ``obj`` with digests into the file that is at ``temporary``."""

    def check(self, fd: int, path: str) -> None:
        """Compare every byte of the file with its digests; raises `CorruptCheckpoint`."""

    def read(self, path: str, fd: int, map_location: Any, verify: bool, weights_only: bool) -> Any:
        """Read what was written."""


def format_of(path: str) -> Format | None:
    """The format that the suffix of ``path`` stands for."""
    for suffix, module in _MODULES.items():
        if path.lower().endswith(suffix):
            found: Format = importlib.import_module(module).FORMAT
            return found
    return None
