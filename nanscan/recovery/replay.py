"""Go through batches, and once more through those that a rollback undid."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from nanscan.recovery.recovery import Recovery

__all__ = ["Replay"]

T = TypeVar("T")


class Replay:
    """The numbered batches since the older snapshot.

    Attributes:
        current: the number of the batch that the loop has now; None outside of `run`.
    """

    def __init__(self) -> None:
        self.current: int | None = None
        self._next = 0
        self._kept: deque[tuple[int, Any]] = deque()

    def start_at(self, last: Any) -> None:
        """Number the next batch as the one after `last`."""
        self._kept.clear()
        self._next = last + 1 if isinstance(last, int) else 0

    def run(self, batches: Iterable[T], recovery: Recovery) -> Iterator[T]:
        """See `Recovery.replay`."""
        again: deque[tuple[int, T]] = deque()
        source = iter(batches)
        try:
            while (item := self._draw(again, source)) is not None:
                number, batch = item
                if recovery.should_skip(number):
                    continue
                self._kept.append(item)
                self.current, rollbacks = number, len(recovery.rollbacks)
                yield batch
                if len(recovery.rollbacks) > rollbacks:
                    again.extendleft(reversed(self._undone(recovery.rollbacks[-1].to_batch)))
                else:
                    self._prune(recovery._oldest_batch())
        finally:
            self.current = None

    def _draw(self, again: deque[tuple[int, T]], source: Iterator[T]) -> tuple[int, T] | None:
        if again:
            return again.popleft()
        for batch in source:
            self._next += 1
            return self._next - 1, batch
        return None

    def _undone(self, to_batch: Any) -> list[tuple[int, Any]]:
        """Take out the batches after the restored moment."""
        undone = [item for item in self._kept if not isinstance(to_batch, int) or item[0] > to_batch]
        for _ in undone:
            self._kept.pop()
        return undone

    def _prune(self, oldest: Any) -> None:
        while isinstance(oldest, int) and self._kept and self._kept[0][0] <= oldest:
            self._kept.popleft()
