"""Changing gradients in place, in PyTorch operators: scale and clamp, zero the bad elements, clear under a flag.

Every unique gradient is changed once. One whose elements share memory (expanded), or that cannot be written
(made under inference mode), is first replaced by a dense copy; a sparse one by its coalesced self.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanscan.engine.tensors import Entry, flat_params, holds_its_values, is_float8, may_overlap, resolve, unique

_TINY = 2.0**-100  # a smaller factor is taken in two steps: it may be subnormal, or zero, as float32


def scale_grads_(param_groups: Sequence[dict[str, Any]], factor: float, clip_value: float | None = None) -> None:
    """``g * factor``, then clamped to [-clip_value, clip_value]; see `nanscan.engine.scale_grads_`.

    Of a complex gradient the real and the imaginary part are clamped each.
    """
    if factor == 1.0 and clip_value is None:
        return

    def change(values: list[Tensor]) -> None:
        for group in _by_kind([torch.view_as_real(v) if v.is_complex() else v for v in values]):
            for step in _steps(factor):
                _multiply(group, step)
            if clip_value is not None and clip_value < torch.finfo(group[0].dtype).max:
                torch._foreach_clamp_min_(group, -clip_value)
                torch._foreach_clamp_max_(group, clip_value)

    _change(param_groups, change)


def divide_grads_(param_groups: Sequence[dict[str, Any]], divisor: Tensor) -> None:
    """Every unique gradient is divided by the 0-dim ``divisor``, without waiting for the device."""

    def change(values: list[Tensor]) -> None:
        for v in values:
            v.div_(divisor)

    _change(param_groups, change)


def zero_nonfinite_grads_(param_groups: Sequence[dict[str, Any]]) -> None:
    """Only NaN and Inf elements become 0; a complex element as a whole; see `nanscan.engine.zero_nonfinite_grads_`."""

    def change(values: list[Tensor]) -> None:
        for v in values:
            v.masked_fill_(~torch.isfinite(v), 0)

    _change(param_groups, change)


def clear_grads_if(param_groups: Sequence[dict[str, Any]], flag: Tensor) -> None:
    """Every gradient becomes 0 where the 0-dim ``flag`` is 1.0, without waiting for the device."""

    def change(values: list[Tensor]) -> None:
        masks: dict[torch.device, Tensor] = {}
        for v in values:
            if v.device not in masks:
                masks[v.device] = flag.detach().eq(1.0).to(v.device, non_blocking=True)
            v.masked_fill_(masks[v.device], 0)

    _change(param_groups, change)


@torch.no_grad()
def writable_grads(param_groups: Sequence[dict[str, Any]]) -> list[Entry]:
    """The unique gradients, after replacing those that cannot be changed in place element by element."""
    params = flat_params(param_groups)
    entries = unique([p.grad for p in params])
    for entry in entries:
        replacement = _replacement(entry)
        if replacement is not None:
            for position in (entry.position, *entry.also):
                params[position].grad = replacement
            entry.source, entry.values = replacement, resolve(replacement)
    return entries


def _replacement(entry: Entry) -> Tensor | None:
    """What has to take the place of this gradient before it is changed in place; None: it can stay."""
    grad, values = entry.source, entry.values
    if grad.layout is torch.sparse_coo and not grad.is_coalesced():
        return grad.detach().coalesce()
    if not holds_its_values(grad):
        return values
    if may_overlap(values) or (values.is_inference() and not torch.is_inference_mode_enabled()):
        return grad.detach().clone(memory_format=torch.contiguous_format)
    return None


@torch.no_grad()
def _change(param_groups: Sequence[dict[str, Any]], change: Callable[[list[Tensor]], None]) -> None:
    """Run ``change`` on the values of every unique gradient; float8 ones, which cannot compute, in float32."""
    values = [entry.values for entry in writable_grads(param_groups)]
    float8 = [(v, v.to(torch.float32)) for v in values if is_float8(v.dtype)]
    change([v for v in values if not is_float8(v.dtype)] + [wide for _, wide in float8])
    for v, wide in float8:
        v.copy_(wide)


def _multiply(group: list[Tensor], factor: float) -> None:
    """``_foreach_mul_``; on a CPU that one rounds the factor to float16 or bfloat16 first (1e-9 becomes 0)."""
    if group[0].device.type == "cpu" and group[0].dtype in (torch.float16, torch.bfloat16):
        for tensor in group:
            tensor.mul_(factor)
    else:
        torch._foreach_mul_(group, factor)


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Grouped by device and dtype, as ``torch._foreach_*`` wants them; empty tensors left out."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            groups[tensor.device, tensor.dtype].append(tensor)
    return list(groups.values())


def _steps(factor: float) -> tuple[float, ...]:
    if factor == 1.0:
        return ()
    return (_TINY, factor / _TINY) if 0 < abs(factor) < _TINY else (factor,)
