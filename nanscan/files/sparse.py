"""Sparse tensors: their values are scanned as stored; an index is found in the dense shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanscan.errors import CorruptCheckpoint
from nanscan.files.entry import Entry

__all__ = ["sparse_entry"]

_COMPRESSED = ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")


def sparse_entry(layout: str, indices: Sequence[Entry], values: Entry, shape: tuple[int, ...]) -> Entry:
    """The entry of a sparse tensor.

    Args:
        layout: ``"sparse_coo"``, ``"sparse_csr"``, ``"sparse_csc"``, ``"sparse_bsr"`` or ``"sparse_bsc"``.
        indices: of COO one entry `(dims, count)`, else two: compressed and plain.
        values: `(count, …)`.
        shape: the dense sizes.

    Raises:
        CorruptCheckpoint: another layout.
    """
    if layout not in ("sparse_coo", *_COMPRESSED):
        raise CorruptCheckpoint(f"a sparse tensor has the unknown layout {layout[:40]!r}")

    def build() -> Tensor:
        return _build(layout, [part.tensor() for part in indices], values.values(), shape)

    def place(at: tuple[int, ...]) -> tuple[int, ...]:
        if layout == "sparse_coo":
            return (*indices[0].tensor()[:, at[0]].tolist(), *at[1:])
        return _compressed_place(layout, [part.tensor().numpy() for part in indices], values.shape, at, shape)

    def check() -> None:
        parts = [part.tensor().numpy() for part in indices]
        _check_indices(layout, parts, values.shape, shape)

    return Entry([], shape, values.element, values.source, values.view, values.unread, place, build, check)


def _check_indices(layout: str, indices: list[Any], values: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise if an index lies outside of the shape."""
    if layout == "sparse_coo":
        limits, fits = shape[: len(indices[0])], indices[0].shape[-1:] == values[:1]
        fits = fits and all(_within(row, limit) for row, limit in zip(indices[0], limits, strict=True))
    else:
        batch = indices[0].ndim - 1
        rows, columns = shape[batch : batch + 2]
        ends, plain, count = *indices, values[batch] if len(values) > batch else -1
        fits = plain.shape[-1:] == (count,) and _within(ends, count + 1) and _within(plain, max(rows, columns))
    if not fits:
        raise CorruptCheckpoint(f"a sparse tensor's indices do not fit its shape {list(shape)}")


def _within(numbers: Any, limit: int) -> bool:
    return numbers.size == 0 or (int(numbers.min()) >= 0 and int(numbers.max()) < limit)


def _build(layout: str, indices: list[Tensor], values: Tensor, shape: tuple[int, ...]) -> Tensor:
    try:
        if layout == "sparse_coo":
            return torch.sparse_coo_tensor(indices[0], values, shape, check_invariants=True)
        make: Any = torch.sparse_compressed_tensor
        result: Tensor = make(*indices, values, shape, layout=getattr(torch, layout), check_invariants=True)
        return result
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise CorruptCheckpoint(f"a sparse tensor's indices do not fit its shape {list(shape)}: {error}") from error


def _compressed_place(
    layout: str, indices: list[Any], values: tuple[int, ...], at: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Where element ``at`` of the values of a CSR, CSC, BSR or BSC tensor stands: (*batch, row, column, *dense)."""
    ends, plain = indices
    batch = ends.ndim - 1
    lead, k, rest = at[:batch], at[batch], at[batch + 1 :]
    try:
        major = int(np.searchsorted(ends[lead], k, side="right")) - 1
        minor = int(plain[lead][k])
    except IndexError as error:
        raise CorruptCheckpoint(f"a sparse tensor's indices do not fit its shape {list(shape)}: {error}") from error
    row, column = (major, minor) if layout in ("sparse_csr", "sparse_bsr") else (minor, major)
    if layout in ("sparse_bsr", "sparse_bsc"):
        height, width = values[batch + 1 : batch + 3]
        return (*lead, row * height + rest[0], column * width + rest[1], *rest[2:])
    return (*lead, row, column, *rest)
