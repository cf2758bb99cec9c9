"""What is wrong with a batch, as plain data, and the exception that carries it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["BadBatch", "BatchProblem", "listed"]


@dataclass(frozen=True)
class BatchProblem:
    """One thing that is wrong with a batch.

    Attributes:
        path: where, as one would type it: `batch["image"][17]` is sample 17 of the field `image`; `batch[1][3]`.
        reason: what is wrong, with values and counts.
        count: how many elements (of a length: how many positions too many; of a field as a whole: 1).
        first: index of the first bad element within what `path` names; None where no single element is to blame.
        severity: `"error"`: it breaks or spoils the step; `"warning"`: it looks wrong and may be meant.
        kind: what sort of problem: `"nonfinite"`, `"label"`, `"no_target"`, `"token"`, `"length"`, `"mask"`, `"box"`,
            `"node"`, `"range"`, `"scale"`, `"constant"`, `"dtype"`, `"shape"`, `"missing"`, `"size"`, `"empty"`,
            `"unreadable"`.
        field: the field as `BatchSpec(fields=…)` names it: `"image"`, `"labels.mask"`, `"1"`.

    >>> print(BatchProblem('batch["image"][1]', "has 4 NaN of 4 (first at [0, 0, 0])", 4, (0, 0, 0)))
    batch["image"][1] has 4 NaN of 4 (first at [0, 0, 0])
    """

    path: str
    reason: str
    count: int = 1
    first: tuple[int, ...] | None = None
    severity: Literal["error", "warning"] = "error"
    kind: str = "nonfinite"
    field: str = ""

    def describe(self) -> str:
        """Path and reason in one line."""
        joint = " " if self.reason.startswith(("has ", "is ")) else ": "
        return f"{self.path}{joint}{self.reason}"

    __str__ = describe

    def to_dict(self) -> dict[str, Any]:
        """The attributes as plain data for JSON.

        >>> BatchProblem("batch", "is empty").to_dict()["first"] is None
        True
        """
        plain = dataclasses.asdict(self)
        plain["first"] = None if self.first is None else list(self.first)
        return plain


class BadBatch(ValueError):
    """A `CheckedLoader` came upon a bad batch; the message names the batch, the field, the sample and what to do.

    Args:
        message: the above, in words.
        problems: what `check_batch` found.
        index: which batch of the epoch, from 0.
        epoch: which pass over the loader, from 0.

    Attributes:
        problems: as given; pickling and copying the exception keep this and the others.
        index: as given.
        epoch: as given.

    >>> error = BadBatch("batch 3 is bad", [BatchProblem("batch", "is empty")], index=3)
    >>> error.index, len(error.problems), isinstance(error, ValueError)
    (3, 1, True)
    """

    def __init__(self, message: str, problems: Sequence[BatchProblem] = (), index: int = 0, epoch: int = 0) -> None:
        super().__init__(message)
        self.problems = list(problems)
        self.index = index
        self.epoch = epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.problems, self.index, self.epoch)


def listed(problems: Sequence[BatchProblem], limit: int = 5) -> str:
    """The problems in one line, at most `limit` of them by name.

    >>> listed([BatchProblem("batch[0]", "is empty")] * 3, limit=2)
    'batch[0] is empty; batch[0] is empty; and 1 more'
    """
    more = len(problems) - limit
    return "; ".join(str(p) for p in problems[:limit]) + (f"; and {more} more" if more > 0 else "")
