"""What happened so far: a bounded ring of step reports and the counters over all steps."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from nanscan.report import StepReport

__all__ = ["History", "Record", "repeat_offender"]

TABLE_BYTES = 32 << 20  # what the per-tensor tables of all reports in a ring may take together
ROW_BYTES = 100  # an engine's row in C++ with its share of containers; measured at 64 to 96
OFFENDER_STEPS = 3


class History(Sequence[StepReport]):
    """The last step reports, oldest first; a read-only sequence.

    Memory is bounded: beyond about 32 MB of per-tensor tables, the oldest reports are kept without theirs (their
    `tensors` then holds the bad rows only). Totals and bad rows always stay.

    Args:
        size: how many reports are kept; older ones fall out.

    >>> history = History(2)
    >>> for step in range(3):
    ...     history.append(StepReport(True, 1.0, 1.0, 1.0, 0, 0, 1, (), (), step=step))
    >>> [report.step for report in history], history[-1].step
    ([1, 2], 2)
    """

    def __init__(self, size: int = 1024, reports: Sequence[StepReport] = ()) -> None:
        self.size = size
        self._slim: deque[StepReport] = deque(reports, size)  # the older ones
        self._full: deque[tuple[StepReport, int]] = deque()  # with their tables, and what these take
        self._bytes = 0

    def append(self, report: StepReport, rows: int = 0) -> None:
        """Add a report whose table has `rows` rows."""
        cost = rows * ROW_BYTES
        self._full.append((report, cost))
        self._bytes += cost
        while self._bytes > TABLE_BYTES and len(self._full) > 1:
            self._slim.append(self._pop_full().without_table())
        if len(self._full) + len(self._slim) > self.size:
            if self._slim:
                self._slim.popleft()
            else:
                self._pop_full()

    def resized(self, size: int) -> History:
        """The same reports in a ring of another size."""
        history = History(size, list(self._slim))
        for report, cost in self._full:
            history.append(report, cost // ROW_BYTES)
        return history

    def _pop_full(self) -> StepReport:
        report, cost = self._full.popleft()
        self._bytes -= cost
        return report

    def __len__(self) -> int:
        return len(self._slim) + len(self._full)

    def __iter__(self) -> Iterator[StepReport]:
        return itertools.chain(self._slim, (report for report, _ in self._full))

    def __reversed__(self) -> Iterator[StepReport]:
        return itertools.chain((report for report, _ in reversed(self._full)), reversed(self._slim))

    @overload
    def __getitem__(self, index: int) -> StepReport: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepReport]: ...
    def __getitem__(self, index: int | slice) -> StepReport | list[StepReport]:
        if isinstance(index, slice):
            return list(self)[index]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"history holds {len(self)} reports, there is no [{index}]")
        return self._slim[at] if at < len(self._slim) else self._full[at - len(self._slim)][0]

    def __repr__(self) -> str:
        return f"History({len(self)} of at most {self.size} reports, {sum(r.skipped for r in self)} skipped)"

    def __getstate__(self) -> dict[str, Any]:
        slim = [*self._slim, *(report.without_table() for report, _ in self._full)]
        return {"size": self.size, "reports": slim}

    def __setstate__(self, state: dict[str, Any]) -> None:
        History.__init__(self, state["size"], state["reports"])


class Record:
    """The counters and the ring of one guarded optimizer, and whoever wants to hear of each step.

    Attributes:
        steps: how many steps were recorded.
        skipped: how many of them were skipped.
        consecutive: how many were skipped in a row up to now.
        first_skipped: index of the first skipped one, None if there is none.
        bad_parameter_steps: after how many the parameters held a NaN or Inf (where that was looked at).
        skipped_last: whether the last one was skipped.
        offenders: the names of the bad tensors of the last skipped steps.
    """

    def __init__(self, size: int = 1024) -> None:
        self.steps = 0
        self.skipped = 0
        self.consecutive = 0
        self.first_skipped: int | None = None
        self.bad_parameter_steps = 0
        self.skipped_last = False
        self.history = History(size)
        self.offenders: deque[tuple[str, ...]] = deque(maxlen=OFFENDER_STEPS)
        self.listener: Callable[[StepReport], Any] | None = None

    def add(self, report: StepReport, rows: int = 0) -> None:
        """Note a step that was taken."""
        self.consecutive = 0
        self.skipped_last = False
        self._keep(report, rows)

    def add_skipped(self, report: StepReport, rows: int = 0) -> None:
        """Note a step that was skipped."""
        self.skipped += 1
        self.consecutive += 1
        self.skipped_last = True
        if self.first_skipped is None:
            self.first_skipped = report.step
        self.offenders.append(tuple(row.name for row in report.bad))
        self._keep(report, rows)

    def _keep(self, report: StepReport, rows: int) -> None:
        self.steps += 1
        self.history.append(report, rows)
        if self.listener is not None:
            self.listener(report)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "listener": None}


def repeat_offender(culprits: Sequence[Sequence[str]], steps: int = OFFENDER_STEPS) -> str | None:
    """What is to be said if the same tensor was bad in each of the last `steps` skipped steps, else None.

    Args:
        culprits: for each skipped step the names of its bad tensors, oldest first.
        steps: how many skipped steps in a row make a repeat offender.

    >>> repeat_offender([["a", "out.bias"], ["out.bias"], ["b", "out.bias"]])
    'last 3 skipped steps: always out.bias'
    """
    last = list(culprits)[-steps:]
    if len(last) < steps:
        return None
    always = [name for name in last[0] if all(name in names for names in last[1:])]
    if not always:
        return None
    more = f" and {len(always) - 3} more" if len(always) > 3 else ""
    return f"last {steps} skipped steps: always {', '.join(always[:3])}{more}"
