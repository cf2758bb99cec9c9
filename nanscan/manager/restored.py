"""What a restore found: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nanscan.matching import MatchReport

__all__ = ["PassedOver", "Restored"]


class PassedOver(NamedTuple):
    """A checkpoint that could not be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Restored:
    """What `CheckpointManager.restore` loaded.

    Attributes:
        step: of the checkpoint; training goes on with the next one.
        epoch: as given to `save`, None if it was not.
        extra: as given to `save`; objects that have a `state_dict()` are there as that.
        path: the file.
        passed_over: newer files that could not be used, newest first, each with the reason.
        missing: names of parts that were asked for and are not in the file ("rng" among them).
        unused: names of parts that are in the file and were not asked for.
        model_match: what of the model's state was matched by name; None if no model was restored.
        optimizer_match: likewise for the optimizer.

    >>> Restored(120, None, {"accuracy": 0.9}, Path("run/step-00000120.pt")).extra["accuracy"]
    0.9
    """

    step: int
    epoch: int | None
    extra: dict[str, Any]
    path: Path
    passed_over: tuple[PassedOver, ...] = ()
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    model_match: MatchReport | None = field(default=None, repr=False)
    optimizer_match: MatchReport | None = field(default=None, repr=False)
