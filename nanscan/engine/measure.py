"""Exact statistics of one tensor in PyTorch operators, piece by piece, never waiting for the device.

A piece is a run of a tensor's elements in row-major order, small enough to be converted to the accumulating dtype
without doubling the memory in use. Each piece is divided by its largest magnitude before it is squared, so that no
square overflows or vanishes. Sums run over rows of `_ROW` elements, whose bits do not depend on the thread count.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanscan.engine.result import Row
from nanscan.engine.tensors import Entry

_ROW = {torch.float64: 1 << 14, torch.float32: 1 << 8}  # float32 loses digits in long sums
_CPU_PIECE = 1 << 16  # 512 KB of float64 stay in cache
_DEVICE_PIECE = 1 << 24


class Piece(NamedTuple):
    """What `measure` found in one piece, on its device; ``norm = ratio * scale`` and ``peak * scale`` are its norms."""

    floats: Tensor  # [ratio, peak, scale] in the accumulating dtype
    counts: Tensor  # [NaN, Inf, first bad index in the piece or -1], int64


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """``tensor`` cut into runs of row-major order, at most `_CPU_PIECE` (`_DEVICE_PIECE`) elements each."""
    limit = _CPU_PIECE if tensor.device.type == "cpu" else _DEVICE_PIECE
    return _cut(tensor, limit)


def _cut(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    if tensor.numel() <= limit:
        if tensor.numel():
            yield tensor
        return
    rows = limit // (tensor.numel() // tensor.shape[0])
    if rows == 0:
        for row in tensor:
            yield from _cut(row, limit)
    else:
        yield from torch.split(tensor, rows)


@functools.cache
def wide_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that cannot compute with float64 (MPS, some XPU)."""
    try:
        torch.ones(2, device=device, dtype=torch.float64).sum().item()
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def widen(piece: Tensor) -> Tensor:
    """The elements of ``piece`` as a flat, dense tensor of the accumulating dtype, complex ones as complex."""
    wide = wide_dtype(piece.device)
    if piece.is_complex():
        return piece.to(wide.to_complex()).reshape(-1)
    return piece.to(wide).reshape(-1)


def components(flat: Tensor) -> Tensor:
    """The real numbers in ``flat``, a dense 1-D tensor: a complex element is two of them."""
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def ordered_norm(flat: Tensor) -> Tensor:
    """2-norm of a dense, real 1-D tensor as a 0-dim one: the same bits whatever the number of threads."""
    norm: Callable[..., Tensor] = torch.linalg.vector_norm
    row = _ROW[flat.dtype]
    while flat.numel() > row:
        whole = flat.numel() // row * row
        flat = torch.cat([norm(flat[:whole].view(-1, row), dim=1), norm(flat[whole:]).reshape(1)])
    return norm(flat)


def measure(piece: Tensor) -> Piece:
    """Norms over the finite elements of ``piece``, exact counts and the first bad index, without waiting for them."""
    flat = widen(piece)
    bad, nan = ~torch.isfinite(flat), torch.isnan(flat)
    finite = components(flat.masked_fill(bad, 0))
    scale = finite.abs().max()
    unit = finite / torch.where(scale > 0, scale, torch.ones_like(scale))
    peak = torch.view_as_complex(unit.view(-1, 2)).abs().max() if flat.is_complex() else unit.abs().max()
    nans, first = nan.sum(), bad.to(torch.uint8).argmax()
    first = torch.where(bad.any(), first, torch.full_like(first, -1))
    return Piece(torch.stack([ordered_norm(unit), peak, scale]), torch.stack([nans, bad.sum() - nans, first]))


def measure_all(tensors: Sequence[Tensor]) -> list[list[Piece]]:
    """`measure` of every piece of every tensor."""
    return [[measure(piece) for piece in pieces(tensor)] for tensor in tensors]


def row_of(entry: Entry, measured: Sequence[tuple[list[float], list[int]]]) -> Row:
    """The row of one tensor from the host values of its pieces, in order."""
    nans = infs = start = 0
    first = -1
    for piece, (_, (nan, inf, at)) in zip(pieces(entry.values), measured, strict=True):
        if at >= 0 and first < 0:
            first = start + at
        nans, infs, start = nans + nan, infs + inf, start + piece.numel()
    norm = math.hypot(*[ratio * scale for (ratio, _, scale), _ in measured])
    peak = max((peak * scale for (_, peak, scale), _ in measured), default=0.0)
    return Row(entry.position, tuple(entry.also), norm, peak, nans, infs, first)
