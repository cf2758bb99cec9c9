"""The micro-batches since the last step: what each of them was, and what their step is to know of it."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanscan.engine.result import EngineScan
from nanscan.losses import mean_loss
from nanscan.report import TensorReport

if TYPE_CHECKING:
    from nanscan.microbatches import MicrobatchReport

__all__ = ["Place", "Window", "counts"]

Place = tuple[int, int | None]  # position of a parameter, and its rank where there are several


class Window:
    """The micro-batches since the last step."""

    def __init__(self) -> None:
        self.weights: list[float] = []
        self.losses: dict[int, Tensor] = {}  # of those micro-batches that came with one, by index
        self.dropped: list[int] = []
        self.overflowed = False  # one was dropped whose loss was not known to be bad: it may be the loss scale's fault
        self.scaler: Any = None  # that is to hear of it
        self.first_bad: int | None = None  # the micro-batch whose NaN is still there
        self.bad_rows: dict[Place, int] = {}  # how many elements of each gradient are NaN or Inf now
        self.bad_count = 0  # and of all
        self.saved = 0  # the gradients that can be put back are those after so many micro-batches
        self.open = False  # the last one was announced before its backward
        self.observed = 0  # of the losses given to `observe`, those that belong to earlier micro-batches
        self.last_bad: tuple[MicrobatchReport, EngineScan] | None = None
        self.buffers: tuple[TensorReport, ...] = ()  # those that the forward pass of a dropped one has spoiled

    def note_bad(self, rows: dict[Place, TensorReport], count: int | None = None) -> None:
        """What is bad in the gradients now; `count`: on all ranks, where there are several."""
        self.bad_rows = counts(rows)
        self.bad_count = sum(self.bad_rows.values()) if count is None else count

    @property
    def nothing_left(self) -> bool:
        """True if every micro-batch was dropped."""
        return bool(self.weights) and len(self.dropped) == len(self.weights)

    @property
    def last_was_dropped(self) -> bool:
        """True if the latest micro-batch was given up."""
        return bool(self.dropped) and self.dropped[-1] == len(self.weights) - 1

    @property
    def factor(self) -> float:
        """What the rest is to be multiplied by, so that it stands for the whole window."""
        kept = sum(weight for i, weight in enumerate(self.weights) if i not in self.dropped)
        return sum(self.weights) / kept if kept and self.dropped else 1.0

    def loss(self) -> float | None:
        """The mean of the losses of the micro-batches that are kept; None if it is not known of each."""
        kept = [index for index in range(len(self.weights)) if index not in self.dropped]
        known = [mean_loss([self.losses[index]]) for index in kept if index in self.losses]
        losses = [loss for loss in known if loss is not None]
        if not kept or len(losses) < len(kept):
            return None
        weights = [self.weights[index] for index in kept]
        if not any(weights):
            weights = [1.0] * len(kept)
        return math.fsum(map(operator.mul, losses, weights)) / math.fsum(weights)

    def facts(self, observed: bool) -> dict[str, Any]:
        """What the report of the step says of its window; `observed`: its loss is known without."""
        counted = {"microbatches": len(self.weights), "dropped": tuple(self.dropped)}
        known = {} if observed or (loss := self.loss()) is None else {"loss": loss}
        return {**counted, "microbatch": self.first_bad, "buffers": self.buffers, **known}


def counts(rows: dict[Place, TensorReport]) -> dict[Place, int]:
    """How many elements of each are NaN or Inf."""
    return {place: row.nan_count + row.inf_count for place, row in rows.items()}
