"""What a DataLoader hands to its workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from nanscan.pickling.places import Place

__all__ = ["is_loader", "worker_arguments"]

_SENT = ("dataset", "collate_fn", "worker_init_fn")  # the sampler and the generator stay in the main process


def is_loader(value: Any) -> bool:
    """Whether `value` is a DataLoader (torchdata's StatefulDataLoader included)."""
    return issubclass(type(value), DataLoader) or type(value).__name__ == "StatefulDataLoader"


def worker_arguments(loader: Any) -> list[Place]:
    """The places that are sent to a worker process, reached from the loader."""
    root = Place(loader)
    return [Place(getattr(loader, name), root, (("attr", name),), 1) for name in _SENT]
