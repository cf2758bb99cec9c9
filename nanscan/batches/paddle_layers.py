"""A layer of PaddlePaddle as a module of PyTorch without data, so that one reader of models serves both."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nanscan import paddle_objects

__all__ = ["outline_of"]

_CONVOLUTIONS = {f"Conv{n}D{t}": f"Conv{t}{n}d" for n in (1, 2, 3) for t in ("", "Transpose")}


def outline_of(layer: Any) -> nn.Module:
    """Children, parameters and buffers under the same names, the sizes of tables and heads; no numbers.

    Args:
        layer: a `paddle.nn.Layer`; a `paddle.DataParallel` is looked into.
    """
    inner = layer
    while type(inner).__name__ in ("DataParallel", "PipelineParallel") and "_layers" in inner._sub_layers:
        inner = inner._sub_layers["_layers"]
    return _outline(inner, set())


def _outline(layer: Any, around: set[int]) -> nn.Module:
    module = _of_known_kind(layer)
    if module is None:
        module = type(type(layer).__name__, (nn.Module,), {})()
        _copy_names(layer, module)
    module.config = getattr(layer, "config", None)
    if isinstance(getattr(layer, "time_major", None), bool):
        module.batch_first = not layer.time_major
    around = around | {id(layer)}
    for name, child in layer._sub_layers.items():
        if child is not None and id(child) not in around and name not in module._modules:
            module._modules[name] = _outline(child, around)
    return module


def _of_known_kind(layer: Any) -> nn.Module | None:
    """Tables and heads as PyTorch has them; of a class derived from one too."""
    kinds = {base.__name__ for base in type(layer).__mro__ if base.__module__.startswith("paddle.nn.")}
    with torch.device("meta"):
        if "Embedding" in kinds:
            rows, columns = map(int, layer.weight.shape)
            return nn.Embedding(rows, columns, padding_idx=_padding(layer, rows))
        if "Linear" in kinds:
            inputs, outputs = map(int, layer.weight.shape)
            return nn.Linear(inputs, outputs, bias=False)
        for name, theirs in _CONVOLUTIONS.items():
            if name in kinds:
                return getattr(nn, theirs)(1, int(layer._out_channels), 1, bias=False)  # type: ignore[no-any-return]
    return None


def _padding(layer: Any, rows: int) -> int | None:
    """Paddle holds -1 for none."""
    index = getattr(layer, "_padding_idx", None)
    return index if index is not None and 0 <= index < rows else None


def _copy_names(layer: Any, module: nn.Module) -> None:
    for held, target in ((layer._parameters, module._parameters), (layer._buffers, module._buffers)):
        for name, value in held.items():
            if value is not None:
                dtype = getattr(torch, paddle_objects.dtype_name(value), torch.float32)
                target[name] = torch.empty(paddle_objects.shape_of(value), dtype=dtype, device="meta")  # type: ignore[assignment]
