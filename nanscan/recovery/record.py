"""One rollback as it is remembered, and what is said about it. Describes; decides nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanscan.report import TensorReport

__all__ = ["Rollback", "Trouble", "full_report"]


@dataclass(frozen=True)
class Trouble:
    """Why it can't go on like this.

    Attributes:
        cause: as in `Rollback`.
        reason: as in `Rollback`.
        bad: as in `Rollback`.
        batches: as in `Rollback`.
    """

    cause: str
    reason: str
    bad: tuple[TensorReport, ...] = ()
    batches: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Rollback:
    """One return to the last good moment.

    Attributes:
        step: the step at which it was noticed: how many calls of `Recovery.step()` came before, counted from 0.
        to_step: as many steps are contained in the state that was restored; 0 = the state at construction.
        cause: `"skips"` (too many bad steps in a row), `"loss"`, `"weights"` (or buffers, or optimizer state),
            `"error"` (the guard raised), or `"rank"` (another rank had to go back).
        reason: the same in words, with names and counts.
        bad: a `TensorReport` for each tensor that held a NaN or Inf.
        batches: the batches that are to blame, by the names given as `step(batch=…)`.
        to_batch: the last batch before the restored moment by such a name; None if there is none.
        lr_before: the learning rate of each group when it was noticed.
        lr_after: and afterwards.
        source: `"memory"`, or the path of the checkpoint that it was restored from.

    >>> Rollback(7, 5, "loss", "the loss is nan", (), (7,), 4, (0.1,), (0.05,)).describe()
    'step 7 back to step 5: the loss is nan; learning rate 0.1 -> 0.05'
    """

    step: int
    to_step: int
    cause: str
    reason: str
    bad: tuple[TensorReport, ...]
    batches: tuple[Any, ...]
    to_batch: Any
    lr_before: tuple[float, ...]
    lr_after: tuple[float, ...]
    source: str = "memory"

    def describe(self) -> str:
        """One line: when, where to, why, who, and the learning rate before and after."""
        origin = "" if self.source == "memory" else f" (from {self.source})"
        rates = f"learning rate {_rates(self.lr_before)} -> {_rates(self.lr_after)}" if self.lr_after else ""
        parts = [f"step {self.step} back to step {self.to_step}{origin}: {self.reason}", rates]
        return "; ".join(part for part in parts if part)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: dicts, tuples, numbers and text (and whatever names the batches have)."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rollback:
        """The inverse of `to_dict`, also after JSON."""
        return cls(**{**_with_tuples(data), "bad": tuple(_row(row) for row in data["bad"])})


def _row(data: Mapping[str, Any]) -> TensorReport:
    return TensorReport(**_with_tuples(data))


def _with_tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def full_report(rollbacks: Sequence[Rollback], trouble: Trouble, step: int, to_step: int) -> str:
    """Why the run is given up: this trouble, and every rollback before it."""
    so_far = f"{len(rollbacks)} rollback{'' if len(rollbacks) == 1 else 's'} so far, as many as max_rollbacks allows"
    lines = [
        f"nanscan: training diverged at step {step}: {trouble.reason}. {so_far}. "
        f"The model is back in its last good state, that of step {to_step}."
    ]
    lines += [f"  {number}. {rollback.describe()}" for number, rollback in enumerate(rollbacks, 1)]
    lines.append(
        "A lower learning rate did not help: look at the tensors named above, at the data (bad_batches), and at what "
        "the model computes just before it."
    )
    return "\n".join(lines)


def _rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates))
