"""What a place is called: steps from the root on, as one would type them, and the name of the root itself."""

from __future__ import annotations

import enum
import json
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nanscan import paddle_objects

__all__ = ["Step", "item_step", "render", "root_name", "type_name"]

Step = tuple[str, Any]
"""`(kind, key)`: kind is `attr`, `item`, `key` (the i-th key or member), `value` (the i-th value) or `text`."""

_LITERALS = (bool, int, float, bytes, type(None))
_REPRS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_BY_TYPE: tuple[tuple[type, str], ...] = (
    (nn.Module, "model"),
    (torch.optim.Optimizer, "optimizer"),
    (torch.optim.lr_scheduler.LRScheduler, "scheduler"),
    (torch.utils.data.DataLoader, "loader"),
    (torch.utils.data.Dataset, "dataset"),
    (dict, "state"),
)


def root_name(value: Any, frame: types.FrameType | None) -> str:
    """The variable of `frame` that holds `value` (locals first), else a name by its type.

    >>> root_name({}, None), root_name(torch.nn.ReLU(), None), root_name(3, None)
    ('state', 'model', 'obj')
    """
    if frame is not None and type(value) not in (*_LITERALS, str):
        for names in (frame.f_locals, frame.f_globals):
            for name, held in list(names.items()):
                if held is value and name.isidentifier() and not name.startswith("_"):
                    return name
    if paddle_objects.is_layer(value) or paddle_objects.is_optimizer(value):
        return "model" if paddle_objects.is_layer(value) else "optimizer"
    return next((name for kind, name in _BY_TYPE if issubclass(type(value), kind)), "obj")


def type_name(value: Any) -> str:
    """The qualified name of a value's type; of builtins the bare name.

    >>> type_name([]), type_name(torch.nn.ReLU())
    ('list', 'torch.nn.modules.activation.ReLU')
    """
    kind = type(value)
    name = str(getattr(kind, "__qualname__", kind.__name__))
    module = getattr(kind, "__module__", None)
    return name if module in (None, "builtins") or not isinstance(module, str) else f"{module}.{name}"


def item_step(key: Any, position: int) -> Step:
    """How the value under `key` is reached: by the key if it can be typed, else by its position."""
    return ("item", key) if _typed(key) is not None else ("value", position)


def _typed(key: Any) -> str | None:
    kind = type(key)
    if kind is str:
        return json.dumps(key, ensure_ascii=False) if key.isprintable() else repr(key)
    if kind in _LITERALS or kind in _REPRS:
        return repr(key)
    if kind is tuple:
        parts = [_typed(part) for part in key]
        return None if None in parts else f"({', '.join(map(str, parts))}{',' if len(parts) == 1 else ''})"
    if issubclass(kind, enum.Enum) and isinstance(key.name, str):
        return f"{kind.__qualname__}.{key.name}"
    return None


def render(name: str, steps: Iterable[Step]) -> str:
    """A path as one would type it.

    >>> render("model", [("attr", "layers"), ("item", 3), ("attr", "_lock")])
    'model.layers[3]._lock'
    >>> render("state", [("item", "hparams"), ("key", 0)])
    'list(state["hparams"])[0]'
    """
    text = name
    for kind, key in _shortened(list(steps)):
        if kind == "attr":
            text += f".{key}" if str(key).isidentifier() else f".__dict__[{_typed(key) or '…'}]"
        elif kind == "item":
            text += f"[{_typed(key)}]"
        elif kind == "index":
            text += f"[{', '.join(map(str, key)) or '()'}]"
        elif kind == "key":
            text = f"list({text})[{key}]"
        elif kind == "value":
            text = f"list({text}.values())[{key}]"
        else:
            text += str(key)
    return text


def _shortened(steps: list[Step], limit: int = 200) -> list[Step]:
    """Nobody types a path of a hundred thousand steps."""
    if len(steps) <= limit:
        return steps
    left_out = len(steps) - limit
    return [*steps[: limit // 2], ("text", f"…({left_out} more)…"), *steps[-limit // 2 :]]


def caller_frame() -> types.FrameType | None:
    """The frame of the caller outside of this package."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("nanscan."):
        frame = frame.f_back
    return frame
