"""The range of one tensor in CPU memory: one read by the engine, or its scan and NumPy where it doesn't serve that.

A tensor is measured while it still lies in the cache. Both work on the memory as it is: no dispatch mode, autocast or
autograd comes between. Small tensors are many, so that each call here counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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
_READ_AS_IS = frozenset({*_AS_INTEGERS, torch.float32, torch.float64})
_TINY = np.float32(TINY)
_new_tuple = tuple.__new__  # Stats(…) takes twice as long
_SIGN_OFF = np.int16(0x7FFF)


def measure(values: Tensor, sample: int | None) -> Stats:
    """The range of a strided tensor with at least one element.

    Args:
        values: of any floating-point or complex dtype.
        sample: NumPy counts zeros and underflows over about as many elements, evenly spread; None: over all.

    Raises:
        BadInput: the elements can't be read.
    """
    if values.is_neg():
        values = values.detach().resolve_neg()
    found = engine.active_engine().measure_ranges(values)
    if found is None:
        return _measure_in_parts(values, sample)
    return _new_tuple(Stats, found + limit_of(values.dtype))


def _measure_in_parts(values: Tensor, sample: int | None) -> Stats:
    row = engine.scan([values]).rows()[0]
    dtype, limit = limit_of(values.dtype)
    values = values.detach()
    if values.dtype not in _READ_AS_IS:
        values = _widened(values)
    halves = _AS_INTEGERS.get(values.dtype)
    array: Array = values.numpy() if halves is None else values.view(torch.int16).numpy()
    positive = 0
    if row.nan_count or row.inf_count:
        low, high, positive = _range_among_bad(values)
    elif halves is not None:
        low, high = _range_of_bits(array, values.dtype)
    else:
        high = float(np.maximum.reduce(array, axis=None))
        low = -row.inf_norm if high < row.inf_norm else float(np.minimum.reduce(array, axis=None))
    zeros, tiny = _small(array, halves, sample)
    return Stats(
        array.size, low, high, row.finite_norm, zeros, tiny, row.nan_count, row.inf_count, positive, dtype, limit
    )


def _widened(values: Tensor) -> Tensor:
    """The modulus of a complex tensor, float8 as float32."""
    if values.dtype is torch.complex32:
        values = values.to(torch.complex64)
    return values.abs() if values.is_complex() else values.float()


def _range_of_bits(bits: Array, dtype: torch.dtype) -> tuple[float, float]:
    """Smallest and largest of 16-bit floats: sign and magnitude, ordered as integers are within either sign."""
    least, most = int(bits.min()), int(bits.max())
    low_bits = int(bits.view(np.uint16).max()) if least < 0 else least
    high_bits = most if most >= 0 else least
    pair = np.array([low_bits & 0xFFFF, high_bits & 0xFFFF], np.uint16).view(np.int16)
    low, high = torch.from_numpy(pair).view(dtype).tolist()
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


def _small(array: Array, halves: int | None, sample: int | None) -> tuple[float, float]:
    """How many elements are 0, and how many others are below 2^-14."""
    flat = _flat(array)
    total = flat.size
    if sample is not None and total > 2 * sample:
        flat = np.ascontiguousarray(flat[:: _stride(total, sample)])
    zeros = below = 0
    for chunk in _chunks(flat) if flat.size > CHUNK else (flat,):
        magnitude = np.abs(chunk) if halves is None else np.bitwise_and(chunk, _SIGN_OFF)
        found = np.count_nonzero(np.less(magnitude, _TINY if halves is None else halves))
        if found:
            zeros += magnitude.size - int(np.count_nonzero(magnitude)) if halves is not None else _zeros(magnitude)
            below += int(found)
    if flat.size == total:
        return zeros, below - zeros
    return zeros * total / flat.size, (below - zeros) * total / flat.size


def _zeros(magnitude: Array) -> int:
    return int(np.count_nonzero(np.equal(magnitude, 0)))


def _stride(total: int, sample: int) -> int:
    """A stride that has no factor in common with any dimension: each channel and each position has its turn."""
    stride = total // sample
    while math.gcd(stride, total) > 1:
        stride += 1
    return stride


def _flat(array: Array) -> Array:
    """One dimension, in the order of memory, so that channels_last isn't copied."""
    return array.ravel(order="K")


def _chunks(flat: Array) -> Iterable[Array]:
    return (flat[start : start + CHUNK] for start in range(0, flat.size, CHUNK))
