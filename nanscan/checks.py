"""A closer look where something is wrong: buffers, parameters with their optimizer state, rows of sparse gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanscan import engine
from nanscan.engine.result import EngineScan, Row
from nanscan.engine.shards import is_dtensor
from nanscan.engine.tensors import full_index
from nanscan.names import Names, buffers_of, label_of
from nanscan.policy import eps_is_lost
from nanscan.report import Label, Report, TensorReport
from nanscan.report_rows import joined

__all__ = ["bad_buffers", "bad_parameters", "dense_bad_rows", "full_places", "lost_eps", "sparse_places", "suspects"]


def bad_buffers(model: nn.Module | None) -> tuple[TensorReport, ...]:
    """The model's floating-point buffers that hold a NaN or Inf, such as BatchNorm's running statistics."""
    if model is None:
        return ()
    buffers, labels = buffers_of(model)
    return Report.from_scan(engine.scan(buffers), labels).bad


def bad_parameters(optimizer: torch.optim.Optimizer, names: Names) -> tuple[TensorReport, ...]:
    """The parameters and entries of the optimizer's state that hold a NaN or Inf, in one scan; a parameter comes first.

    A finite gradient can make the state alone Inf: Adam's second moment holds its square, and once that is Inf the
    weight never moves again.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [_float_state(optimizer, p) for p in params]
    values = [value for p, state in zip(params, states, strict=True) for value in (p, *state.values())]
    scan = engine.scan(values)
    if scan.finite:
        return ()
    labels: list[Label] = []
    known = names.renewed(optimizer.param_groups)
    for param, state, label in zip(params, states, known, strict=True):
        own = label_of(param, label.names, "parameter")
        of = f"of '{joined(own.names)}'"
        labels += [own, *(label_of(value, (f"{key} {of}",), "state") for key, value in state.items())]
    return Report.from_scan(scan, labels, full_places(scan, values)).bad


def _float_state(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    """The entries of a parameter's state that can hold a NaN and can be read (not, say, quantized ones)."""
    state = optimizer.state.get(param, {}).items()
    plain = {key: value for key, value in state if type(value) in (Tensor, nn.Parameter) or is_dtensor(value)}
    return {key: value for key, value in plain.items() if value.is_floating_point() or value.is_complex()}


def lost_eps(optimizer: torch.optim.Optimizer, names: Names) -> list[tuple[str, float]]:
    """(first parameter's name, eps) of each group whose eps its float16 parameters can't hold."""
    labels = iter(names.refresh(0, optimizer.param_groups))
    found = []
    for group in optimizer.param_groups:
        own = [next(labels) for _ in group["params"]]
        lost = [label.names[0] for label in own if eps_is_lost(group, label.dtype)]
        if lost:
            found.append((lost[0], float(group["eps"])))
    return found


def suspects(optimizer: torch.optim.Optimizer, names: Names) -> list[str]:
    """The settings that make a NaN or Inf of finite gradients, in words: an eps that is lost, a number that is NaN."""
    lost = sorted({eps for _, eps in lost_eps(optimizer, names)})
    found = [f"eps={eps:g} is 0 in float16" if eps else "eps=0, so an element can be 0/0" for eps in lost]
    for i, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if _is_number(value) and not math.isfinite(value)}
        found += [f"{key} of group {i} is {float(value)}: look at what sets it" for key, value in settings.items()]
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.dim() == 0)


def sparse_places(scan: EngineScan, groups: list[dict[str, Any]]) -> dict[int, tuple[int, ...]]:
    """Position -> index of the first bad element, for the sparse and sharded gradients among the bad ones."""
    return full_places(scan, [p.grad for group in groups for p in group["params"]])


def full_places(scan: EngineScan, tensors: Sequence[Tensor | None]) -> dict[int, tuple[int, ...]]:
    """As `sparse_places`, for any tensors."""
    places = {}
    for row in scan.bad_rows():
        tensor = tensors[row.position] if row.position < len(tensors) else None
        if tensor is not None and (tensor.layout is not torch.strided or is_dtensor(tensor)):
            places[row.position] = full_index(tensor, row.first_bad)
    return places


def dense_bad_rows(scan: EngineScan, labels: Sequence[Label], groups: list[dict[str, Any]]) -> list[Row]:
    """The bad rows; `first_bad` of a sparse gradient counts through its dense shape, which other ranks know too."""
    places = sparse_places(scan, groups)
    return [
        Row(*row)._replace(first_bad=_flat(places[row.position], labels[row.position].shape))
        if row.position in places
        else Row(*row)
        for row in scan.bad_rows()
    ]


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    flat = 0
    for at, size in zip(index, shape, strict=True):
        flat = flat * size + at
    return flat
