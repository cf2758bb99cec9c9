"""Element types as files name them, and stored bytes turned into tensors of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanscan.errors import CorruptCheckpoint

__all__ = ["Element", "of_numpy", "of_torch"]

_SWAPPED = ">" if sys.byteorder == "little" else "<"
_KINDS = "fc"


@dataclass(frozen=True)
class Element:
    """What one element of a tensor is.

    Attributes:
        name: such as ``"float32"``.
        itemsize: bytes.
        dtype: as PyTorch calls it; None where it has no such type.
        floating: whether it can hold NaN or Inf.
        unit: how many bytes are to be reversed at a time (another machine's byte order); 0 = none.
        long: NumPy's type where PyTorch has none, such as ``longdouble``.
    """

    name: str
    itemsize: int
    dtype: torch.dtype | None
    floating: bool
    unit: int = 0
    long: Any = None

    def tensor(self, raw: memoryview) -> Tensor:
        """The elements in ``raw`` (whole ones), 1-dim; shares its memory where that is possible."""
        if self.long is not None:
            return _narrowed(np.frombuffer(raw, self.long))
        if self.dtype is None:
            raise CorruptCheckpoint(f"elements of type {self.name} cannot be read by PyTorch")
        if len(raw) == 0:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        if self.unit > 1:
            numbers = np.frombuffer(raw, f"u{self.unit}")
            numbers.byteswap(inplace=True)
        if self.dtype is torch.bool:  # any other byte than 0 and 1 would be undefined
            return torch.frombuffer(raw, dtype=torch.uint8) != 0
        return torch.frombuffer(raw, dtype=torch.uint8).view(self.dtype)


def of_torch(dtype: torch.dtype, *, big_endian: bool = False) -> Element:
    """The element of a PyTorch dtype.

    >>> of_torch(torch.bfloat16).itemsize, of_torch(torch.int8).floating
    (2, False)
    """
    name = str(dtype).removeprefix("torch.")
    floating = (dtype.is_floating_point or dtype.is_complex) and not name.startswith("float4")
    unit = dtype.itemsize // (2 if dtype.is_complex else 1)
    swap = big_endian != (sys.byteorder == "big")
    return Element(name, dtype.itemsize, dtype, floating, unit if swap and unit > 1 else 0)


def of_numpy(dtype: np.dtype[Any]) -> Element:
    """The element of a NumPy dtype, of any byte order; one that holds no numbers has no ``dtype``.

    >>> of_numpy(np.dtype(">f4")).unit, of_numpy(np.dtype("U3")).dtype
    (4, None)
    """
    name = dtype.name
    swapped = dtype.byteorder == _SWAPPED
    unit = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    if dtype.kind in _KINDS and unit > 8:
        return Element(name, dtype.itemsize, None, True, 0, dtype)
    try:
        plain = torch.from_numpy(np.zeros(0, dtype.newbyteorder("="))).dtype
    except (TypeError, ValueError):
        return Element(name, dtype.itemsize, None, False)
    return Element(name, dtype.itemsize, plain, dtype.kind in _KINDS, unit if swapped else 0)


def _narrowed(values: np.ndarray[Any, Any]) -> Tensor:
    """Extended precision as double precision; what is finite stays finite."""
    narrow = np.complex128 if values.dtype.kind == "c" else np.float64
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(narrow)
    lost = ~np.isfinite(result) & np.isfinite(values)
    result[lost] = np.finfo(np.float64).max
    return torch.from_numpy(result)
