"""Snapshots in memory: two copies of the training state; the newer stays whole while the other is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanscan import engine
from nanscan.recovery.finite import FiniteCheck
from nanscan.recovery.training_state import TrainingState
from nanscan.report import TensorReport
from nanscan.state_copy import StateCopy, memory_id

__all__ = ["Memory", "Moment", "Saved"]

_GROWN = 2.0  # a newer copy with weights so many times as large may have been taken on the way to the divergence


@dataclass(frozen=True)
class Moment:
    """When a copy was taken: after how many steps, with which batch, and after how many rollbacks."""

    step: int
    batch: Any = None
    rollbacks: int = 0


@dataclass
class Saved:
    """One copy of a finite training state.

    Attributes:
        work: the copy that was made; its `result` is what `TrainingState.restore` takes.
        moment: when it was taken.
        devices: as for `TrainingState.restore`.
        nonfinite: how many NaN, and how many Inf, they hold (in buffers that may).
        failures: how often a run failed that started from it.
    """

    work: StateCopy
    moment: Moment
    devices: dict[int, torch.device] = field(default_factory=dict)
    nonfinite: tuple[int, int] = (0, 0)
    failures: int = 0

    @property
    def content(self) -> dict[str, Any]:
        """What `TrainingState.restore` takes."""
        found: dict[str, Any] = self.work.result
        return found

    def counts(self) -> tuple[int, int]:
        """How many NaN, and how many Inf, the copy holds now."""
        scan = engine.scan([target for target in self.work.targets if _can_hold_nan(target)])
        return scan.nan_count, scan.inf_count

    def intact(self) -> bool:
        """False if somebody has written a NaN or Inf into the copy."""
        return self.counts() == self.nonfinite

    def norm(self) -> float:
        """The 2-norm of all weights."""
        values = self.content["params"].values()
        return engine.scan([value for value in values if _can_hold_nan(value)]).finite_norm


class Memory:
    """The last two good moments.

    Args:
        state: what is copied. Tensors on CUDA are copied to the host's memory: the device's is scarcer.
        check: says whether it is finite, with names where it is not.
    """

    def __init__(self, state: TrainingState, check: FiniteCheck) -> None:
        self._state = state
        self._check = check
        self.newest: Saved | None = None
        self.older: Saved | None = None
        self._spare: Saved | None = None  # memory to be written over

    def take(self, moment: Moment) -> tuple[TensorReport, ...]:
        """Copy the present state if it is finite; returns what is bad, () if it was taken.

        Everything is read once. Whatever happens in the middle, the newest copy before this call stays whole.
        """
        spare = self._spare or self.older
        self.older, self._spare = None, spare
        work = StateCopy(self._state.content(), spare.work if spare else None, _place)
        saved = Saved(work, moment)
        try:
            bad = self._fill(work, saved)
        finally:
            work.release()
        if bad:
            return bad
        self.older, self.newest, self._spare = self.newest, saved, None
        return ()

    def choose(self, anywhere: Callable[[bool], bool] = bool) -> Saved | None:
        """The copy to go back to; None if there is none that is intact.

        The newest; but where it has failed before, and its weights are much larger than those of the one before it,
        it was probably taken when the divergence had begun, and is given up for the older one.

        Args:
            anywhere: says whether something holds on any rank: all give up the same copies.
        """
        newest, older = self.newest, self.older
        if newest and older and newest.failures and anywhere(newest.norm() > _GROWN * older.norm()):
            self._drop_newest()
        while self.newest is not None and anywhere(not self.newest.intact()):
            self._drop_newest()
        return self.newest

    def forget(self) -> None:
        """Give both copies up; their memory is used again."""
        self._spare = self._spare or self.older or self.newest
        self.newest = self.older = None

    def _drop_newest(self) -> None:
        self._spare, self.newest, self.older = self.newest, self.older, None

    @torch.no_grad()
    def _fill(self, work: StateCopy, saved: Saved) -> tuple[TensorReport, ...]:
        """Copy and look; stops where something bad is found."""
        looked = self.newest is None  # has the whole state been looked at by name?
        if looked and (bad := self._check.bad()):
            return bad
        apart = engine.scan([source for source in work.apart if _can_hold_nan(source)])
        finite = work.run_finite()
        if not (finite and apart.finite) and not looked and (bad := self._check.bad()):
            return bad
        if torch.cuda.is_available():  # else nothing has changed its device
            pairs = zip(work.sources, work.targets, strict=True)
            saved.devices = {memory_id(t): s.device for s, t in pairs if s.device != t.device}
        if saved.devices:
            torch.cuda.synchronize()
        if not finite:
            saved.nonfinite = saved.counts()
        return ()


def _place(tensor: Tensor) -> torch.device:
    """The host for tensors of a CUDA device."""
    return torch.device("cpu") if tensor.is_cuda and type(tensor) is Tensor else tensor.device


def _can_hold_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
