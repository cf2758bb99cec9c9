"""Scan one file: every tensor, block by block, one row each; what goes wrong becomes a part of the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanscan import engine
from nanscan.checkpoint.load import verify_file
from nanscan.errors import CheckpointError, CorruptCheckpoint
from nanscan.files.entry import Contents, Entry, Pieces
from nanscan.files.formats import open_file
from nanscan.files.hdf5 import hdf5_damage
from nanscan.files.layout import Block
from nanscan.report_rows import joined

__all__ = ["FileScan", "TensorRow", "scan_file"]

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class TensorRow:
    """What was found in one tensor of a file.

    Attributes:
        name: its path; a tied one lists all its names.
        shape, dtype: as stored; of a sparse tensor the dense sizes.
        nan_count, inf_count: elements; a complex one counts once.
        first_bad: index of the first NaN or Inf in row-major order; None if there is none.
        finite_norm: 2-norm over the finite elements.
        inf_norm: largest magnitude of a finite element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nan_count: int
    inf_count: int
    first_bad: tuple[int, ...] | None
    finite_norm: float
    inf_norm: float

    @property
    def finite(self) -> bool:
        """True if no element is NaN or Inf."""
        return not (self.nan_count or self.inf_count)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))


@dataclass
class FileScan:
    """What was found in one file.

    Attributes:
        path: as given.
        format: such as ``"torch zip"``; "" if it could not be told.
        size: bytes.
        tensors: how many were scanned, tied ones once.
        elements: how many numbers they hold.
        skipped: how many tensors can't hold a NaN or Inf (integers, quantized, no data).
        rows: one for each scanned tensor.
        notes: what else should be known, a sentence each.
        error: why it could not be scanned to its end; None if it was.
        misuse: whether the error is one of the question (no such file, no reader), not of the file.
        names: every name in it, also of tensors that were not scanned.
    """

    path: Path
    format: str = ""
    size: int = 0
    tensors: int = 0
    elements: int = 0
    skipped: int = 0
    rows: list[TensorRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    misuse: bool = False
    names: set[str] = field(default_factory=set)

    def bad(self, *, nan_only: bool = False) -> list[TensorRow]:
        """The rows with a NaN or Inf; with ``nan_only`` those with a NaN."""
        return [row for row in self.rows if row.nan_count or (row.inf_count and not nan_only)]


def scan_file(path: Path, progress: Progress | None = None) -> FileScan:
    """Scan one file for NaN and Inf, with bounded memory; no code in it is run.

    Args:
        path: the file.
        progress: called with the bytes done and the bytes in all.

    Returns:
        What was found, up to the error if there was one.
    """
    result = FileScan(path)
    try:
        result.size = path.stat().st_size
        with open_file(path) as contents:
            result.format, result.notes = contents.format, contents.notes
            result.error = _damage(path, contents.format)
            _scan(contents, result, progress or (lambda done, total: None))
    except CorruptCheckpoint as error:
        result.error = result.error or str(error)
    except CheckpointError as error:
        result.error, result.misuse = str(error), True
    except OSError as error:
        result.error, result.misuse = (error.strerror or str(error)), True
    except MemoryError:
        result.error = "it asks for more memory than there is"
    return result


def _damage(path: Path, form: str) -> str | None:
    """What the file's own check sums say against it: nanscan's digests, or the CRC-32 of a zip."""
    if form == "hdf5":
        return hdf5_damage(path)
    suffix = path.suffix.lower()
    if not (form == "safetensors" and suffix == ".safetensors") and not (
        form == "torch zip" and suffix not in (".safetensors", ".h5", ".hdf5")
    ):
        return None
    try:
        verify_file(path)
    except CorruptCheckpoint as error:
        return str(error)
    except ImportError:  # the library of a format, which reading it here does without
        return None
    return None


def _scan(contents: Contents, result: FileScan, progress: Progress) -> None:
    total = sum(entry.stored for entry in contents.entries if entry.scanned)
    pieces, done = Pieces(), 0
    for entry in contents.entries:
        result.names.update(entry.names)
        if not entry.scanned:
            result.skipped += 1
            continue
        if entry.check is not None:
            entry.check()
        tally = _Tally(entry)
        for block, values in pieces.of(entry):
            tally.add(block, values)
            done += block.numel * values.element_size()
            progress(done, total)
        result.rows.append(tally.row())
        result.tensors += 1
        result.elements += entry.view.numel if entry.view is not None else 0


class _Tally:
    """Sums up the blocks of one tensor."""

    def __init__(self, entry: Entry) -> None:
        assert entry.view is not None
        self._entry = entry
        self._view = entry.view
        self._in_order = entry.view.order == sorted(entry.view.order)
        self._nan = self._inf = 0
        self._norms: list[float] = []
        self._largest = 0.0
        self._first: tuple[int, ...] | None = None

    def add(self, block: Block, values: Tensor) -> None:
        (row,) = engine.scan([values]).rows()
        self._nan += row.nan_count
        self._inf += row.inf_count
        self._norms.append(row.finite_norm)
        self._largest = max(self._largest, row.inf_norm)
        if row.first_bad >= 0 and (self._first is None or not self._in_order):
            self._earlier(self._view.first(self._places(row.first_bad, values) + block.start))

    def _places(self, first: int, values: Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self._in_order:
            return np.array([first])
        wide = values if values.dtype.itemsize > 1 else values.float()  # float8 has no isfinite
        return torch.nonzero(~torch.isfinite(wide)).flatten().numpy()

    def _earlier(self, index: tuple[int, ...]) -> None:
        self._first = index if self._first is None else min(self._first, index)

    def row(self) -> TensorRow:
        repeat, entry = self._view.repeat, self._entry
        first = entry.place(self._first) if self._first is not None and entry.place is not None else self._first
        norm = math.hypot(*self._norms) * math.sqrt(repeat)
        return TensorRow(
            joined(entry.names), entry.shape, entry.element.name, self._nan * repeat, self._inf * repeat, first, norm,
            self._largest,
        )  # fmt: skip
