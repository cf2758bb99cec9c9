"""Snapshots in memory: two copies of the training state; the newer stays whole while the other is written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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

_CHUNK_BYTES = 1 << 20  # is looked at and then copied while it is in the processor's cache
_GROWN = 2.0  # a newer copy with weights so many times as large may have been taken on the way to the divergence

Pair = tuple[Tensor, Tensor]


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
        content: what `TrainingState.restore` takes.
        moment: when it was taken.
        norm: 2-norm of all weights.
        devices: as for `TrainingState.restore`.
        floats: the tensors in it that can hold a NaN.
        nonfinite: how many NaN, and how many Inf, they hold (in buffers that may).
        failures: how often a run failed that started from it.
    """

    content: dict[str, Any]
    moment: Moment
    norm: float = 0.0
    devices: dict[int, torch.device] = field(default_factory=dict)
    floats: list[Tensor] = field(default_factory=list)
    nonfinite: tuple[int, int] = (0, 0)
    failures: int = 0

    def intact(self) -> bool:
        """False if somebody has written a NaN or Inf into the copy."""
        scan = engine.scan(self.floats)
        return (scan.nan_count, scan.inf_count) == self.nonfinite


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

        Everything is read once: a piece is scanned, then copied while it is still in the cache. Whatever happens in
        the middle, the newest copy before this call stays whole.
        """
        spare = self._spare or self.older
        self.older, self._spare = None, spare
        work = StateCopy(self._state.content(), spare.content if spare else None, _place)
        saved = Saved(work.result, moment)
        bad = self._fill(work, saved)
        if bad:
            return bad
        self.older, self.newest, self._spare = self.newest, saved, None
        return ()

    def choose(self) -> Saved | None:
        """The copy to go back to; None if there is none that is intact.

        The newest; but where it has failed before, and its weights are much larger than those of the one before it,
        it was probably taken when the divergence had begun, and is given up for the older one.
        """
        newest, older = self.newest, self.older
        if newest is not None and older is not None and newest.failures and newest.norm > _GROWN * older.norm:
            self._drop_newest()
        while self.newest is not None and not self.newest.intact():
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
        """Scan and copy, piece by piece; stops where something bad is found."""
        weights = {memory_id(value) for value in saved.content["params"].values()}
        looked = self.newest is None  # has the whole state been looked at by name?
        if looked and (bad := self._check.bad()):
            return bad
        squares, nan, inf = 0.0, 0, 0
        for pairs, sources in _pieces(work):
            scan = engine.scan(sources)
            if not scan.finite and not looked:
                looked = True
                if bad := self._check.bad():
                    return bad
            nan, inf = nan + scan.nan_count, inf + scan.inf_count
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            if pairs and memory_id(pairs[0][1]) in weights:
                squares += scan.finite_norm**2
        crossed = {memory_id(t): s.device for s, t in work.pairs if s.device != t.device}
        if crossed:
            torch.cuda.synchronize()
        saved.norm, saved.nonfinite, saved.devices = math.sqrt(squares), (nan, inf), crossed
        saved.floats = [target for _, target in work.pairs if _can_hold_nan(target)]
        return ()


def _pieces(work: StateCopy) -> Iterator[tuple[list[Pair], list[Tensor]]]:
    """Pairs of tensors (or of parts of large ones) to be copied together, and the tensors to be scanned before."""
    yield [], [source for source in work.apart if _can_hold_nan(source)]
    piece: list[Pair] = []
    room = _CHUNK_BYTES
    for pair in _parts(work.pairs):
        size = pair[0].numel() * pair[0].element_size()
        if piece and size > room:
            yield piece, [source for source, _ in piece if _can_hold_nan(source)]
            piece, room = [], _CHUNK_BYTES
        piece.append(pair)
        room -= size
    yield piece, [source for source, _ in piece if _can_hold_nan(source)]


def _parts(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Large tensors of the host in parts that fit in the cache; others whole."""
    for source, target in pairs:
        step = _CHUNK_BYTES // source.element_size()
        small = source.numel() <= step or source.device.type != "cpu"
        if small or not (source.is_contiguous() and target.is_contiguous()):
            yield source, target
        else:
            yield from zip(torch.split(source.view(-1), step), torch.split(target.view(-1), step), strict=True)


def _place(tensor: Tensor) -> torch.device:
    """The host for tensors of a CUDA device."""
    return torch.device("cpu") if tensor.is_cuda and type(tensor) is Tensor else tensor.device


def _can_hold_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
