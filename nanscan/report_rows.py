"""One tensor's row of a report: what the tensor is called, what was found in it, and the words for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nanscan.engine.result import Row

__all__ = ["Label", "TensorReport", "joined", "tensor_report", "unravel"]

_OWNER = {"grad": "grad of '{name}'", "state": "optimizer state {name}", "loss": "{name}", "tensor": "'{name}'"}


class Label(NamedTuple):
    """What a tensor is called and what it looks like; kept instead of the tensor itself."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    device: str
    kind: str = "tensor"


@dataclass(frozen=True)
class TensorReport:
    """One tensor's row of a `Report`.

    Attributes:
        name: the tensor's name; a tied one lists all of them: `"emb.weight (= head.weight)"`.
        shape: its shape, a tuple of ints (`()` for 0-dim).
        dtype: its element type without the `torch.` prefix, such as `"bfloat16"`.
        device: its device, such as `"cpu"` or `"cuda:0"`.
        norm: its 2-norm; NaN if an element is NaN, inf if one is Inf and none is NaN.
        inf_norm: the largest magnitude of its finite elements (0.0 if there are none).
        nan_count: how many elements are NaN. A complex element counts once.
        inf_count: how many elements are Inf and not NaN.
        first_bad: index of the first NaN or Inf in row-major order, None if there is none. For a sparse tensor it is
            the index in the dense shape: the first number is the row id. Of several in a CUDA tensor whose memory is
            in another order (channels_last), it is the one that comes first in memory.
        rank: the process that holds it, None where there is only one.
        kind: what it is: `"grad"`, `"loss"`, `"buffer"`, `"parameter"`, `"state"` or plain `"tensor"`.

    >>> row = TensorReport("fc.bias", (10,), "float32", "cpu", float("nan"), 0.5, 2, 0, (3,), kind="grad")
    >>> row.finite, row.numel
    (False, 10)
    >>> row.describe()
    "grad of 'fc.bias' has 2 NaN, 0 Inf of 10 (first at [3])"
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    norm: float
    inf_norm: float
    nan_count: int
    inf_count: int
    first_bad: tuple[int, ...] | None
    rank: int | None = None
    kind: str = "tensor"

    @property
    def finite(self) -> bool:
        """True if no element is NaN or Inf."""
        return not (self.nan_count or self.inf_count)

    @property
    def numel(self) -> int:
        """The number of elements of the (dense) shape."""
        return math.prod(self.shape)

    def describe(self) -> str:
        """One clause that says what is wrong and where, or that nothing is."""
        owner = _OWNER.get(self.kind, "{kind} '{name}'").format(kind=self.kind, name=self.name)
        where = "" if self.rank is None else f" on rank {self.rank}"
        if self.finite:
            return f"{owner}{where} is finite (norm {self.norm:.6g})"
        first = "" if self.first_bad is None else f" (first at {list(self.first_bad)})"
        return f"{owner}{where} has {self.nan_count} NaN, {self.inf_count} Inf of {self.numel}{first}"


def tensor_report(
    row: Row, labels: Sequence[Label], places: Mapping[int, tuple[int, ...]] | None = None
) -> TensorReport:
    """The public row for an engine's row: names for positions, an index tuple for a flat index."""
    label = labels[row.position]
    names = list(label.names)
    for position in row.also:
        names += [item for item in labels[position].names if item not in names]
    place = None
    if row.first_bad >= 0:
        place = (places or {}).get(row.position) or unravel(row.first_bad, label.shape)
    norm = math.nan if row.nan_count else math.inf if row.inf_count else row.finite_norm
    return TensorReport(
        joined(names), label.shape, label.dtype, label.device, norm, row.inf_norm, row.nan_count, row.inf_count, place,
        rank=getattr(row, "rank", None), kind=label.kind,
    )  # fmt: skip


def joined(names: Sequence[str]) -> str:
    """All names of one tensor as one: the first, then those that it is tied to.

    >>> joined(["emb.weight", "head.weight"])
    'emb.weight (= head.weight)'
    """
    return names[0] if len(names) == 1 else f"{names[0]} (= {', '.join(names[1:])})"


def unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index tuple of a flat row-major index.

    >>> unravel(7, (2, 5)), unravel(0, ())
    ((1, 2), ())
    """
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))
