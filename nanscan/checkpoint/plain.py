"""What the formats for plain data have in common: flat or nested dicts of tensors, and refusals by path."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanscan.checkpoint.digest import Region
from nanscan.errors import CheckpointError
from nanscan.pickling.naming import type_name
from nanscan.pickling.problem import PickleProblem, in_lines

__all__ = ["Leaf", "bytes_of", "device_of", "import_optional", "leaves", "refusal", "system_error"]

Leaf = tuple[tuple[Any, ...], Any]  # keys from the root on, value
_SYSTEM = re.compile(r"(?:os error |errno = )(\d+)")


def import_optional(name: str, extra: str, path: str) -> Any:
    """Import the library of a format."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(
            f"cannot save or load {path!r}: it needs the library {name.partition('.')[0]}, which is not installed: "
            f"pip install 'nanscan[{extra}]'"
        ) from error


def leaves(obj: Any, keys: tuple[Any, ...] = ()) -> Iterator[Leaf]:
    """What is not a dict, with the keys that lead to it; an empty dict is a leaf too."""
    if isinstance(obj, Mapping) and (obj or not keys):
        for key, value in list(obj.items()):
            yield from leaves(value, (*keys, key))
    else:
        yield keys, obj


def refusal(keys: Sequence[Any], value: Any, reason: str, fix: str) -> PickleProblem:
    """One place that a format can't hold."""
    path = "state" + "".join(f'["{key}"]' if isinstance(key, str) else f"[{key!r}]" for key in keys)
    return PickleProblem(path, type_name(value), reason, fix, steps=tuple(("item", key) for key in keys))


def refuse(path: str, problems: Sequence[PickleProblem]) -> None:
    """Raise for places that a format can't hold; the name of the state is not known here."""
    if problems:
        listed = in_lines(problems)
        error = CheckpointError(
            f"cannot save to {path!r}: {len(problems)} value(s) don't fit into this format. Change them as said, leave "
            f'them out with on_unpicklable="drop", or save as .pt:\n  {listed}'
        )
        error.problems = list(problems)  # type: ignore[attr-defined]
        raise error


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat) if tensor.numel() else memoryview(b"")


def device_of(map_location: Any, path: str) -> torch.device:
    """The device that tensors of a plain format go to."""
    if map_location is None or isinstance(map_location, (str, torch.device, int)):
        return torch.device("cpu" if map_location is None else map_location)
    raise TypeError(
        f"map_location is a {type(map_location).__name__}, but {path!r} stores no devices: give one device, such as "
        '"cpu" or "cuda:0"'
    )


def system_error(error: Exception) -> OSError | None:
    """The system's own error behind what a library raised."""
    if isinstance(error, OSError) and error.errno:
        return error
    found = _SYSTEM.search(str(error))
    return OSError(int(found[1]), str(error)) if found else None


def tensor_region(name: str, start: int, size: int, digest: str) -> Region:
    """The bytes of a tensor, to be compared with its digest."""
    return Region(f"archive/data/{name}", start, size, digest, (name,))
