"""The ranks that save and restore together: each hears what the others have to say, errors too."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from nanscan.errors import CheckpointError

__all__ = ["ALONE", "Ranks", "RanksLost", "timeout_of"]

T = TypeVar("T")


class RanksLost(CheckpointError):
    """The other ranks do not answer: nothing can be said about what they did."""


class _Answer(NamedTuple):
    """What one rank did: its value, or the error instead."""

    value: Any = None
    error: BaseException | None = None


class Ranks:
    """A gloo group of its own, so that what is said here never mixes with what the training says.

    Args:
        ranks: global ranks, this one among them; all of them make it together. None: this process alone.
        timeout: after which a rank that does not answer is given up; None: that of torch.

    Attributes:
        group: the process group, None for a process alone.
        index: of this process among them.
        ranks: as given.
    """

    def __init__(self, ranks: Sequence[int] | None, timeout: timedelta | None = None) -> None:
        self.group: Any = None
        self.index = 0
        self.ranks = [0] if ranks is None else list(ranks)
        if ranks is not None:
            self.index = self.ranks.index(dist.get_rank())
            local = len(ranks) < dist.get_world_size()  # the others do not take part in making it
            self.group = dist.new_group(self.ranks, timeout, "gloo", use_local_synchronization=local)

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """True on the rank that decides."""
        return self.index == 0

    def close(self) -> None:
        """Give the group up."""
        if self.group is not None and dist.is_initialized():
            with contextlib.suppress(Exception):  # the program has ended it already, or a rank has died
                dist.destroy_process_group(self.group)
        self.group = None

    def gather(self, value: T, what: str) -> list[T]:
        """The value of every rank, by index.

        Raises:
            RanksLost: a rank did not answer.
        """
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        self._run(lambda: dist.all_gather_object(found, value, group=self.group), what)
        return found

    def together(self, do: Callable[[], T], what: str) -> list[T]:
        """What `do` returned on each rank; where it raised on one, all raise the error of the first of these."""
        answer = _tried(do)
        answers = self.gather(answer._replace(error=_portable(answer.error)), what)
        for index, other in enumerate(answers):
            if other.error is not None:
                raise answer.error if index == self.index and answer.error is not None else other.error
        return [other.value for other in answers]

    def by_first(self, do: Callable[[], T], what: str) -> T:
        """What `do` returned on the first rank, which alone runs it, or the error that it raised there, on all."""
        answer = _tried(do) if self.is_first else _Answer()
        told = [answer._replace(error=_portable(answer.error))]
        if self.group is not None:
            self._run(lambda: dist.broadcast_object_list(told, self.ranks[0], group=self.group), what)
        if told[0].error is not None:
            raise answer.error or told[0].error
        value: T = told[0].value
        return value

    def _run(self, collective: Callable[[], Any], what: str) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise RanksLost(
                f"nanscan: {what} could not be shared between the ranks {self.ranks}: {error}. A rank has died, waits "
                "elsewhere, or did not call save() and restore() as often as the others. Checkpoints that were "
                "complete before stay; restart from the newest of them"
            ) from error


ALONE = Ranks(None)


def timeout_of(group: Any) -> timedelta | None:
    """The time-out of a process group, None if it can't be told."""
    for device in ("cpu", "cuda", "xpu"):
        with contextlib.suppress(Exception):
            found = group._get_backend(torch.device(device)).options._timeout
            if isinstance(found, timedelta):
                return found
    return None


def _tried(do: Callable[[], Any]) -> _Answer:
    try:
        return _Answer(do())
    except RanksLost:
        raise
    except Exception as error:
        return _Answer(error=error)


def _portable(error: BaseException | None) -> BaseException | None:
    """The error, or one that says the same where it can't be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return CheckpointError(f"{type(error).__name__}: {error}")
