"""The engine in plain PyTorch operators: any device, no compiler.

A healthy tensor is read twice (norm and largest magnitude, ``torch._foreach_norm`` where that serves); only one that
holds a NaN or Inf, or float64 values whose squares leave float64, is measured exactly in a further pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanscan.engine.apply import clear_grads_if, scale_grads_, zero_nonfinite_grads_
from nanscan.engine.deferred import launch_grads
from nanscan.engine.measure import components, measure_all, ordered_norm, pieces, row_of, wide_dtype, widen
from nanscan.engine.result import Row, Scan, total
from nanscan.engine.tensors import Entry, flat_params, is_plain_float, unique

__all__ = ["clear_grads_if", "launch_grads", "scale_grads_", "scan", "scan_grads", "zero_nonfinite_grads_"]

_SMALL = 1 << 14  # up to here PyTorch's CPU reductions are serial, so their bits don't depend on the thread count
_SQUARE_FITS = (1e-140, 1e140)  # magnitudes whose squares, and sums of them, are normal float64 numbers


@torch.no_grad()
def scan(tensors: Sequence[Tensor | None], extra: Sequence[Tensor] = ()) -> Scan:
    """Scan ``tensors`` and ``extra``; see `nanscan.engine.scan`."""
    entries, others = unique(tensors), unique(extra, len(tensors))
    rows = _rows([*entries, *others])
    return total(rows[: len(entries)], rows[len(entries) :], sum(e.values.numel() for e in entries))


def scan_grads(param_groups: Sequence[dict[str, Any]], extra: Sequence[Tensor] = ()) -> Scan:
    """Scan the gradient of every parameter; see `nanscan.engine.scan_grads`."""
    return scan([p.grad for p in flat_params(param_groups)], extra)


def _rows(entries: Sequence[Entry]) -> list[Row]:
    norms = _quick_norms([entry.values for entry in entries])
    rows = [_healthy_row(entry, norm) for entry, norm in zip(entries, norms, strict=True)]
    unsure = [i for i, row in enumerate(rows) if row is None]
    measured = measure_all([entries[i].values for i in unsure])
    for i, found in zip(unsure, measured, strict=True):
        rows[i] = row_of(entries[i], [(p.floats.tolist(), p.counts.tolist()) for p in found])
    return [row for row in rows if row is not None]


def _healthy_row(entry: Entry, norms: tuple[float, float]) -> Row | None:
    """The row of a tensor whose quick norms are the whole truth, else None."""
    norm, peak = norms
    if not math.isfinite(peak):
        return None
    if peak > 0 and not _SQUARE_FITS[0] < peak < _SQUARE_FITS[1]:
        return None
    return Row(entry.position, tuple(entry.also), norm, peak, 0, 0, -1)


def _quick_norms(tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
    """(2-norm, largest magnitude) of each; the latter is NaN or inf exactly where the tensor holds one."""
    norms = [(0.0, 0.0)] * len(tensors)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        if _suits_foreach(tensor):
            groups[tensor.device, tensor.dtype].append(i)
        elif tensor.device.type == "cpu" and wide_dtype(tensor.device) is torch.float64:
            norms[i] = _blocked_norms(tensor)
        else:
            norms[i] = (math.nan, math.nan) if tensor.numel() else (0.0, 0.0)
    for group in groups.values():
        for i, pair in zip(group, _foreach_norms([tensors[i] for i in group]), strict=True):
            norms[i] = pair
    return norms


def _suits_foreach(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or not is_plain_float(tensor.dtype):
        return False
    if tensor.device.type == "cpu":
        return tensor.numel() <= _SMALL
    return wide_dtype(tensor.device) is torch.float64


def _foreach_norms(group: list[Tensor]) -> list[tuple[float, float]]:
    norms = torch.stack(torch._foreach_norm(group, 2, dtype=torch.float64))
    peaks = torch.stack(torch._foreach_norm(group, math.inf)).to(torch.float64)
    return [(norm, peak) for norm, peak in torch.stack([norms, peaks], 1).tolist()]


def _blocked_norms(tensor: Tensor) -> tuple[float, float]:
    """The quick norms of one CPU tensor, piece by piece so that nothing but a piece is converted at a time."""
    norms, peaks = [], [0.0]
    for piece in pieces(tensor):
        flat = widen(piece)
        norms.append(ordered_norm(components(flat)).item())
        low, high = torch.aminmax(flat.abs() if flat.is_complex() else flat)
        peaks.append(torch.maximum(-low, high).item())
    return math.hypot(*norms), math.nan if any(map(math.isnan, peaks)) else max(peaks)
