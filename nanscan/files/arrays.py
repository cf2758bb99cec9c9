"""NumPy's arrays as entries: every field of a structured one, any byte order, C or Fortran order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nanscan.errors import CorruptCheckpoint
from nanscan.files.elements import Element, of_numpy, of_torch
from nanscan.files.entry import Entry
from nanscan.files.layout import View, row_major
from nanscan.files.source import Source

__all__ = ["Found", "array_entries", "ml_dtype"]

_MAX_FIELDS = 1000
_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")


class Found(NamedTuple):
    """An entry, and what its name has after that of the object it is a part of."""

    suffix: str
    entry: Entry


class _Leaf(NamedTuple):
    suffix: str
    element: Element
    offset: int
    shape: tuple[int, ...]


def ml_dtype(name: str) -> Element | None:
    """The element of a type of the package ``ml_dtypes``, by name."""
    return of_torch(getattr(torch, name)) if name in _ML_DTYPES and hasattr(torch, name) else None


def array_entries(
    source: Source, dtype: np.dtype[Any] | Element, shape: Sequence[int], *, fortran: bool = False, offset: int = 0
) -> list[Found]:
    """The entries of one array.

    Args:
        source: holds its bytes.
        dtype: its type.
        shape: its sizes.
        fortran: whether the first index changes fastest.
        offset: bytes before its first element.

    Raises:
        CorruptCheckpoint: it reaches beyond ``source``.
    """
    leaves = [_Leaf("", dtype, 0, ())] if isinstance(dtype, Element) else list(_leaves(dtype))
    itemsize = dtype.itemsize
    whole = row_major(tuple(reversed(shape)) if fortran else tuple(shape), itemsize, offset)
    whole.check(source.size)
    strides = tuple(reversed(whole.strides)) if fortran else whole.strides
    return [Found(leaf.suffix, _entry(source, leaf, tuple(shape), strides, offset)) for leaf in leaves]


def _entry(source: Source, leaf: _Leaf, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Entry:
    inner = row_major(leaf.shape, leaf.element.itemsize)
    view = View((*shape, *leaf.shape), (*strides, *inner.strides), offset + leaf.offset, leaf.element.itemsize)
    if leaf.element.itemsize == 0:
        return Entry([], view.shape, leaf.element, unread="elements of no size")
    unread = "" if leaf.element.dtype is not None or leaf.element.long is not None else "no numbers"
    return Entry([], view.shape, leaf.element, source, view, unread)


def _leaves(dtype: np.dtype[Any], suffix: str = "", offset: int = 0) -> Iterator[_Leaf]:
    """The plain types that a dtype consists of."""
    base, shape = dtype.subdtype if dtype.subdtype is not None else (dtype, ())
    if base.fields is None:
        yield _Leaf(suffix, of_numpy(base), offset, tuple(int(n) for n in shape))
        return
    if math.prod(shape) * len(base.fields) > _MAX_FIELDS:
        raise CorruptCheckpoint(f"an array has a type of more than {_MAX_FIELDS} fields")
    for place in np.ndindex(*shape):
        at = offset + int(np.ravel_multi_index(place, shape) if shape else 0) * base.itemsize
        where = f"[{', '.join(map(str, place))}]" if shape else ""
        for name, (field, start, *_) in base.fields.items():
            yield from _leaves(field, f'{suffix}{where}["{name}"]', at + start)
