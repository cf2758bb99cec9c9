"""What can't be done yet where each rank holds a part of the parameters: a clear error before anything happens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nanscan.engine.shards import is_dtensor

__all__ = ["refuse_sharded"]


def refuse_sharded(tensors: Iterable[Any], what: str, instead: str) -> None:
    """Raise if one of the tensors is a DTensor.

    Args:
        tensors: anything; other objects are passed over.
        what: the function that can't take them.
        instead: what to do.

    Raises:
        NotImplementedError: one is.
    """
    if any(is_dtensor(tensor) for tensor in tensors):
        raise NotImplementedError(
            f"{what} does not take sharded parameters (DTensor, as fully_shard and tensor parallelism make them) in "
            f"this version of nanscan: {instead}"
        )
