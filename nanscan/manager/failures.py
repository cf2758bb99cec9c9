"""What becomes of the error of a save: it is counted, and raised, or a warning where training is to go on."""

from __future__ import annotations

from typing import Literal

from nanscan import messages
from nanscan.errors import CheckpointError, CheckpointWarning, NonFiniteError
from nanscan.manager.arguments import one_of
from nanscan.manager.sharded.ranks import RanksLost

__all__ = ["Failures", "OnError"]

OnError = Literal["raise", "warn"]


class Failures:
    """Hears of every save that failed.

    Args:
        on_error: "warn": a save that could not be made is no reason to stop. One that was refused because the state
            is not finite is raised all the same, as training itself has failed then, and so is the loss of other ranks.

    Attributes:
        count: how many there were.
    """

    def __init__(self, on_error: OnError) -> None:
        self._warns = one_of("on_error", on_error, ("raise", "warn")) == "warn"
        self.count = 0

    def tell(self, error: BaseException | None) -> None:
        """Raise what made a save fail, or warn about it; None: it did not.

        >>> Failures("raise").tell(None)
        """
        if error is None:
            return
        self.count += 1
        if not self._warns or not isinstance(error, CheckpointError) or isinstance(error, RanksLost):
            if isinstance(error, (CheckpointError, NonFiniteError)):  # it says all: no frames of the thread that wrote
                error.__traceback__ = None
            raise error
        messages.warn(f"nanscan: a checkpoint was not saved, and training goes on: {error}", CheckpointWarning)
