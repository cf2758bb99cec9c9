"""A manager's saves and restores where several ranks make them: decided together, told to all, or failed on all."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from nanscan.errors import CheckpointError
from nanscan.manager.folder import Entry
from nanscan.manager.sharded.mode import Mode, mode_of
from nanscan.manager.sharded.place import clean_up
from nanscan.manager.sharded.ranks import ALONE, Ranks, timeout_of
from nanscan.manager.sharded.write import Options, write_sharded
from nanscan.matching.compare import plain_names
from nanscan.names import clean
from nanscan.rng import rng_state

if TYPE_CHECKING:
    from nanscan.manager.manager import CheckpointManager

__all__ = ["Job", "Together", "Word"]


class Word(NamedTuple):
    """What all ranks say at a call of `save`: is one due, is the process to stop, and which errors all know of."""

    due: bool
    stop: bool
    done: int


class Job(NamedTuple):
    """A save on its way: the state that this rank writes, and what goes with it."""

    state: Any
    metric: dict[str, float]
    buffers: frozenset[str]


class Together:
    """The ranks of one manager.

    Args:
        given: `process_group` of the manager.

    Attributes:
        mode: how the run is saved; None: by this process alone, or not known yet.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self.mode: Mode | None = None
        self._front: Ranks | None = None  # for what the training thread says
        self._back: Ranks | None = None  # for what the writing thread says
        self._for: tuple[Any, ...] = ()
        self._world: Any = None
        self._submitted = 0
        self.done = 0
        self._errors: deque[tuple[int, BaseException]] = deque()

    def find(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Mode | None:
        """The mode for these parts; makes the groups when they are needed first, on all ranks together."""
        if self._given is False or not dist.is_available() or not dist.is_initialized():
            return None
        if self._world is not dist.group.WORLD:  # another init_process_group: the groups of the former are gone
            self.close()
            self._world = dist.group.WORLD
        known = [part() for part in self._for]
        if not self._for or known[0] is not model or known[1] is not optimizer:
            mode = mode_of(self._given, model, optimizer)
            if mode is not None and self._front is None:
                ranks = sorted(dist.get_process_group_ranks(mode.group))
                self._front, self._back = Ranks(ranks, timeout_of(mode.group)), Ranks(ranks, timeout_of(mode.group))
            self.mode = mode
            self._for = (_reference(model), _reference(optimizer))
        return self.mode

    @property
    def active(self) -> bool:
        """True if several ranks are known to act together."""
        return self.mode is not None

    @property
    def front(self) -> Ranks:
        """The ranks, for the training thread; this process alone where there are none."""
        return self._front if self._front is not None and self.mode is not None else ALONE

    @property
    def back(self) -> Ranks:
        """The ranks, for the thread that writes."""
        return self._back if self._back is not None and self.mode is not None else ALONE

    def close(self) -> None:
        """Give the groups up."""
        for ranks in (self._front, self._back):
            if ranks is not None:
                ranks.close()
        self._front = self._back = None
        self._for, self.mode = (), None

    # ---- what all ranks say ------------------------------------------------------------------------------------------

    def word(self, step: int, due: bool, stop: bool) -> Word:
        """What the ranks decide on this call: due where the first one says so, stop where any does.

        Raises:
            CheckpointError: they are not at the same step.
        """
        told = self.front.gather((step, due, stop, self.done), f"whether to save step {step}")
        steps = [item[0] for item in told]
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the ranks {self.front.ranks} save different steps together: {steps}. Every rank must call save() for "
                "the same steps, with the same force="
            )
        return Word(told[0][1], any(item[2] for item in told), min(item[3] for item in told))

    def next_error(self, done: int | None = None) -> BaseException | None:
        """The oldest error of a save that nobody was told about, among the first `done` saves; it is then forgotten."""
        if self._errors and (done is None or self._errors[0][0] <= done):
            return self._errors.popleft()[1]
        return None

    def submitted(self, write: Callable[[], None]) -> Callable[[], None]:
        """`write`, whose end is counted and whose error is kept until all ranks know of it."""
        self._submitted += 1
        number = self._submitted

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._errors.append((number, error))
            self.done = number

        return run

    # ---- writing -----------------------------------------------------------------------------------------------------

    def with_ranks(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state that the first rank writes for replicas: what is each rank's own, gathered, is in "ranks"."""
        own = {"rng": state.get("rng", rng_state()), **({"loader": state["loader"]} if "loader" in state else {})}
        every = self.front.gather(own, "the random states")
        return {**state, "ranks": every} if self.front.is_first else {}

    def write(self, manager: CheckpointManager, step: int, job: Job) -> None:
        """Write one checkpoint on all ranks; returns, or raises the same, on all."""
        folder, ranks = manager._folder, self.back
        assert self.mode is not None
        if self.mode.replicated:
            entry = Entry(step, folder.file(step))
            ranks.by_first(lambda: manager._write(step, job.state), "the checkpoint")
            manager._retention.wrote(entry, next(iter(job.metric.values()), None))
            return
        options = Options(manager._check_finite, manager._on_unpicklable)
        with manager._noted.saving(step, folder.directory(step)) if ranks.is_first else nullcontext():  # in one log
            entry = write_sharded(job.state, job.buffers, job.metric, folder, ranks, options)
        manager._retention.wrote(entry, next(iter(job.metric.values()), None))
        ranks.by_first(lambda: self._tidy(manager, step), "what goes")

    def _tidy(self, manager: CheckpointManager, step: int) -> None:
        """Older checkpoints that need not stay, and what killed writers left."""
        manager._retention.apply(step)
        clean_up(manager._folder.path, [entry.path for entry in manager._folder.incomplete()])

    def job(self, state: dict[str, Any], model: nn.Module | None, metric: Mapping[str, float]) -> Job:
        """What this rank is going to write."""
        names = [] if model is None else [name for name, _ in model.named_buffers()]
        plain = plain_names(model, names) if model is not None else {}
        return Job(state, dict(metric), frozenset(clean(plain.get(name, name)) for name in names))


def _reference(part: Any) -> Callable[[], Any]:
    return (lambda: None) if part is None else weakref.ref(part)
