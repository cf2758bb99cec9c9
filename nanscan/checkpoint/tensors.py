"""Every tensor inside a nested state, each with its path as a person would type it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanscan import paddle_objects
from nanscan.checkpoint.turns import give_way
from nanscan.pickling.lost import lost_function
from nanscan.pickling.parts import own_attributes

__all__ = ["Found", "Seen", "keyed", "tensors_in"]

_LEAVES = frozenset(
    {bool, int, float, complex, str, bytes, bytearray, type(None), torch.dtype, torch.device, torch.Size}
)

_LONG = 2000  # bits; a little more takes another opcode


class Found(NamedTuple):
    """A tensor, of PaddlePaddle perhaps, and where it is; ``note`` says more.

    The note is, for instance, the parameter that an optimizer's state belongs to.
    """

    path: str
    tensor: Tensor
    note: str = ""

    @property
    def label(self) -> str:
        return self.path + self.note


@dataclass
class Seen:
    """What else a walk came by.

    Attributes:
        huge: integers that pickle writes with an opcode of its own.
        lost_functions: where a scheduler's state has None for a function, by path.
    """

    huge: list[int] = field(default_factory=list)
    lost_functions: list[str] = field(default_factory=list)


def tensors_in(obj: Any, seen: Seen | None = None) -> list[Found]:
    """The tensors in dicts, lists, tuples, sets, modules, optimizers and attributes of objects, in order.

    A top-level key stands alone, deeper ones in brackets: ``optimizer["state"][3]["exp_avg"]``.

    >>> import torch
    >>> [found.path for found in tensors_in({"model": {"fc.weight": torch.ones(1)}, "seen": [torch.ones(1)]})]
    ['model["fc.weight"]', 'seen[0]']
    """
    return list(_Walk(seen or Seen()).walk(obj, ""))


class _Walk:
    """One walk; an object that is reached twice is entered once (tensors are listed under every path)."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.entered: dict[int, Any] = {}  # id -> object, kept alive so that no id is used twice
        self.names: Mapping[Any, str] = {}

    def walk(self, value: Any, path: str) -> Iterator[Found]:
        if issubclass(type(value), Tensor):  # isinstance would ask the value's own __class__
            give_way()
            yield Found(path or "tensor", value)
        elif type(value) not in _LEAVES and id(value) not in self.entered:
            self.entered[id(value)] = value
            yield from self._inside(value, path)
        else:
            self._is_leaf(value)

    def _is_leaf(self, value: Any) -> bool:
        """Whether there is nothing inside; asked before a path is written, as a state may hold a million numbers."""
        kind = type(value)
        if kind is int and value.bit_length() > _LONG:
            self.seen.huge.append(value)
        return kind in _LEAVES

    def _inside(self, value: Any, path: str) -> Iterator[Found]:
        kind = type(value)
        if issubclass(kind, Mapping):
            yield from self._mapping(value if issubclass(kind, dict) else _as_dict(value), path)
        elif issubclass(kind, (list, tuple, deque, set, frozenset)):
            names = getattr(value, "_fields", None) if issubclass(kind, tuple) else None
            for position, item in enumerate(value):
                if not self._is_leaf(item):
                    inner = f"{path}[{position}]" if not names else _dotted(path, names[position])
                    yield from self.walk(item, inner)
        elif issubclass(kind, nn.Module):
            for name, tensor in [*value.named_parameters(), *value.named_buffers()]:
                yield Found(_dotted(path, name), tensor)
        elif issubclass(kind, torch.optim.Optimizer):
            yield from self._mapping(value.state_dict(), path)
        elif paddle_objects.is_tensor(value):
            yield Found(path or "tensor", value)
        elif not issubclass(kind, (type, ModuleType)) and not callable(value):
            for name, item in own_attributes(value).items():
                yield from self.walk(item, _dotted(path, name))

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Iterator[Found]:
        names = _parameter_names(value)
        self.seen.lost_functions += [f"{keyed(path, key)}[{index}]" for key, index in lost_function(value)]
        for key, item in list(value.items()):
            if self._is_leaf(item):
                continue
            inner = keyed(path, key)
            if names and key == "state" and isinstance(item, Mapping):
                yield from self._optimizer_state(item, inner, names)
                continue
            if isinstance(value.get("optimizer_names"), Sequence) and key == "optimizer":
                self.names = dict(enumerate(name for group in value["optimizer_names"] for name in group))
            yield from self.walk(item, inner)

    def _optimizer_state(self, state: Mapping[Any, Any], path: str, names: Mapping[Any, str]) -> Iterator[Found]:
        """The state of each parameter, with that parameter's name where the groups tell it."""
        names = names if any(names.values()) else self.names
        for key, item in list(state.items()):
            note = f" of '{names[key]}'" if names.get(key) else ""
            for found in self.walk(item, keyed(path, key)):
                yield found._replace(note=note)


def _as_dict(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """What a mapping of the user's own holds; nothing where its code fails, as pickling it is asked next."""
    try:
        return dict(value.items())
    except Exception:
        return {}


def _parameter_names(value: Mapping[Any, Any]) -> dict[Any, str]:
    """Index -> name ("" if unknown) if this is an optimizer's state_dict; else nothing."""
    groups = value.get("param_groups") if "state" in value else None
    found: dict[Any, str] = {}
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, Mapping) and isinstance(group.get("params"), list):
            names = group.get("param_names") or [""] * len(group["params"])
            found.update(zip(group["params"], names, strict=False))
    return found


def keyed(path: str, key: Any) -> str:
    """The path of what a mapping at `path` holds under `key`."""
    if isinstance(key, str):
        return f'{path}["{key}"]' if path else key
    return f"{path}[{key!r}]"


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
