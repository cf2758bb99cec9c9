"""The range of one tensor in CPU memory: the engine's scan, and NumPy for what the engine doesn't say.

A tensor is measured while it still lies in the cache. NumPy is used because it works on the memory as it is: it is seen
by no dispatch mode, autocast or autograd, and for chunks that fit the cache it is as fast as PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanscan import engine
from nanscan.ranges.stats import TINY, Stats, limit_of

__all__ = ["measure"]

Array = npt.NDArray[Any]
CHUNK = 1 << 16
_AS_INTEGERS = {torch.bfloat16: 0x3880, torch.float16: 0x0400}  # bits of 2^-14


def measure(values: Tensor, sample: int | None) -> Stats:
    """The range of a plain strided tensor with at least one element.

    Args:
        values: of any floating-point or complex dtype.
        sample: zeros and underflows are counted over about as many elements, evenly spread; None: over all.
    """
    row = engine.scan([values]).rows()[0]
    name, limit = limit_of(values.dtype)
    values = _readable(values.detach())
    bad = row.nan_count + row.inf_count
    positive = 0
    if bad:
        low, high, positive = _range_among_bad(values)
    else:
        low, high = _range(values, row.inf_norm)
    zeros, tiny = _small(values, sample)
    return Stats(
        values.numel(), low, high, row.finite_norm, zeros, tiny, row.nan_count, row.inf_count, positive, name, limit
    )


def _readable(values: Tensor) -> Tensor:
    """In a dtype that NumPy has, or whose bits are read."""
    if values.dtype in _AS_INTEGERS or values.dtype in (torch.float32, torch.float64):
        return values
    return values.resolve_conj().to(torch.complex64).abs() if values.dtype is torch.complex32 else _wide(values)


def _wide(values: Tensor) -> Tensor:
    return values.abs() if values.is_complex() else values.float()


def _range(values: Tensor, peak: float) -> tuple[float, float]:
    """Smallest and largest element of finite ones, the largest magnitude being known."""
    if values.dtype in _AS_INTEGERS:
        return _range_of_bits(values)
    array = values.numpy()
    high = float(np.maximum.reduce(array, axis=None))
    return (-peak if high < peak else float(np.minimum.reduce(array, axis=None))), high


def _range_of_bits(values: Tensor) -> tuple[float, float]:
    """The same for 16-bit floats: sign and magnitude, which are ordered as integers are within either sign."""
    bits = values.view(torch.int16).numpy()
    least, most = int(bits.min()), int(bits.max())
    low_bits = int(bits.view(np.uint16).max()) if least < 0 else least
    high_bits = most if most >= 0 else least
    pair = np.array([low_bits & 0xFFFF, high_bits & 0xFFFF], np.uint16).view(np.int16)
    low, high = torch.from_numpy(pair).view(values.dtype).tolist()
    return low, high


def _range_among_bad(values: Tensor) -> tuple[float, float, int]:
    """Smallest and largest finite element, and how many are +Inf; (inf, -inf, …) if none is finite."""
    low, high, positive = math.inf, -math.inf, 0
    for chunk in _chunks(_flat(values.to(torch.float64).numpy())):
        finite = chunk[np.isfinite(chunk)]
        low = min(low, float(finite.min(initial=math.inf)))
        high = max(high, float(finite.max(initial=-math.inf)))
        positive += int(np.count_nonzero(chunk == math.inf))
    return low, high, positive


def _small(values: Tensor, sample: int | None) -> tuple[float, float]:
    """How many elements are 0, and how many others are below 2^-14."""
    halves = _AS_INTEGERS.get(values.dtype)
    flat = _flat(values.numpy() if halves is None else values.view(torch.int16).numpy())
    total = flat.size
    if sample is not None and total > 2 * sample:
        flat = np.ascontiguousarray(flat[:: _stride(total, sample)])
    zeros = below = 0
    for chunk in _chunks(flat):
        magnitude = np.abs(chunk) if halves is None else chunk & np.int16(0x7FFF)
        found = np.count_nonzero(np.less(magnitude, TINY if halves is None else halves))
        if found:
            zeros += np.count_nonzero(np.equal(magnitude, 0))
            below += found
    scale = total / flat.size
    return zeros * scale, (below - zeros) * scale


def _stride(total: int, sample: int) -> int:
    """A stride that has no factor in common with any dimension: each channel and each position has its turn."""
    stride = total // sample
    while math.gcd(stride, total) > 1:
        stride += 1
    return stride


def _flat(array: Array) -> Array:
    """One dimension, in the order of memory, so that channels_last isn't copied."""
    return array.ravel(order="K")


def _chunks(flat: Array) -> Iterator[Array]:
    return (flat[start : start + CHUNK] for start in range(0, flat.size, CHUNK))
