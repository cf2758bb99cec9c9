"""What the first batches have in common, as a spec."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanscan.batches.check import check_batch
from nanscan.batches.fields import Field, fields_of
from nanscan.batches.problem import BadBatch, listed
from nanscan.batches.spec import BatchSpec, FieldSpec
from nanscan.batches.walk import leaves_of
from nanscan.engine.tensors import is_float8

__all__ = ["Learner", "learnt"]

_OF_ANY_LENGTH = ("token", "position", "padding", "attention")


@dataclass
class _Seen:
    """One field so far; a size that has differed is None, and so is the shape once the number of dimensions has."""

    dtype: torch.dtype | None
    shape: tuple[int | None, ...] | None
    low: float = math.inf
    high: float = -math.inf
    nan: bool = False


class Learner:
    """Takes in good batches one by one and makes a spec of them.

    Args:
        base: what is known already.
        margin: how far ranges are widened, as a fraction of their width.

    Raises:
        ValueError: `margin` is negative or NaN.
    """

    def __init__(self, base: BatchSpec, margin: float = 1.0) -> None:
        if not margin >= 0:
            raise ValueError(f"margin must be 0 or more, not {margin!r}")
        self.base = base
        self.margin = margin
        self.count = 0
        self._seen: dict[str, _Seen] = {}
        self._partly: set[str] = set()

    def add(self, batch: Any) -> None:
        """Take in one batch."""
        leaves = leaves_of(batch)
        here: set[str] = set()
        for field, (_, value) in zip(fields_of(leaves), leaves, strict=True):
            here.add(field.field)
            self._add_field(field, value.detach())
        self._partly |= here ^ self._seen.keys() if self.count else set()
        self.count += 1

    def _add_field(self, field: Field, value: Tensor) -> None:
        shape: tuple[int | None, ...] = tuple(field.shape)
        if shape and field.batched:
            shape = (None, *shape[1:])
        if len(shape) > 1 and field.role in _OF_ANY_LENGTH:
            shape = (*shape[:-1], None)
        seen = self._seen.setdefault(field.field, _Seen(field.dtype, shape))
        seen.dtype = seen.dtype if seen.dtype is field.dtype else None
        seen.shape = _common(seen.shape, shape)
        ranged = self.base.value_range is not None and field.role in ("image", "input")
        if ranged or field.additive or not field.dtype.is_floating_point:
            return
        if value.numel() and value.layout is torch.strided:
            self._add_range(seen, value.float() if is_float8(value.dtype) else value)

    def _add_range(self, seen: _Seen, value: Tensor) -> None:
        if value.is_nested:
            return
        low, high = torch.stack(torch.aminmax(value)).tolist()
        if math.isnan(low):  # allowed by the base
            return
        seen.low, seen.high = min(seen.low, low), max(seen.high, high)

    def spec(self) -> BatchSpec:
        """The spec; fields that not every batch had are left out."""
        known = dict(self.base.fields or {})
        for name, seen in self._seen.items():
            if name not in known and name not in self._partly:
                known[name] = self._field_spec(seen)
        made = dataclasses.replace(self.base, fields=known)
        made._sources.update(self.base._sources)
        made._token_types.update(self.base._token_types)
        return made

    def _field_spec(self, seen: _Seen) -> FieldSpec:
        if not (math.isfinite(seen.low) and math.isfinite(seen.high)):
            return FieldSpec(seen.dtype, seen.shape)
        width = seen.high - seen.low or abs(seen.high) or 1.0
        return FieldSpec(seen.dtype, seen.shape, seen.low - self.margin * width, seen.high + self.margin * width)


def _common(seen: tuple[int | None, ...] | None, new: tuple[int | None, ...]) -> tuple[int | None, ...] | None:
    if seen is None or len(seen) != len(new):
        return None
    return tuple(a if a == b else None for a, b in zip(seen, new, strict=True))


def learnt(batches: Iterable[Any], base: BatchSpec, margin: float) -> BatchSpec:
    """`BatchSpec.learn`."""
    learner = Learner(base, margin)
    for index, batch in enumerate(batches):
        problems = [problem for problem in check_batch(batch, base) if problem.severity == "error"]
        if problems:
            raise BadBatch(f"cannot learn from batch {index}: {listed(problems)}", problems, index)
        learner.add(batch)
    if learner.count == 0:
        raise ValueError("no batch to learn from: the iterable is empty")
    return learner.spec()
