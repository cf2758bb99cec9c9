"""What happened so far: a bounded ring of step reports and the counters over all steps."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from nanscan.health import trouble
from nanscan.report import Label, StepReport

if TYPE_CHECKING:
    from nanscan.engine.result import EngineScan, Row

__all__ = ["Healthy", "History", "Record", "repeat_offender"]

TABLE_BYTES = 32 << 20  # what the per-tensor tables of all reports in a ring may take together
ROW_BYTES = 250  # a row of an engine in Python; a compiled one says itself what it holds (about 20)
OFFENDER_STEPS = 3


@dataclass(frozen=True, slots=True)
class Totals:
    """An engine's result without its rows."""

    finite: bool
    norm: float
    finite_norm: float
    inf_norm: float
    nan_count: int
    inf_count: int
    numel: int
    count: int = 0
    signature: int = 0
    row_major: bool = False

    def rows(self) -> list[Row]:
        return []

    def bad_rows(self) -> list[Row]:
        return []


class Healthy(NamedTuple):
    """A step on which nothing was wrong, as it is kept until somebody asks for its report."""

    scan: EngineScan
    labels: Sequence[Label]
    step: int
    time: float
    clip_factor: float

    def report(self) -> StepReport:
        """The step's report."""
        return StepReport.from_scan(
            self.scan,
            self.labels,
            step=self.step,
            time=self.time,
            clip_factor=self.clip_factor,
            skipped=False,
            action="step",
        )

    def without_table(self) -> Healthy:
        """The same with totals only."""
        s = self.scan
        totals = Totals(s.finite, s.norm, s.finite_norm, s.inf_norm, s.nan_count, s.inf_count, s.numel)
        return self._replace(scan=totals, labels=())


Entry = StepReport | Healthy


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

    def __init__(self, size: int = 1024, entries: Iterable[Entry] = ()) -> None:
        self.size = size
        self._full: deque[Entry] = deque()  # the newer ones, with their tables
        self._slim: deque[Entry] = deque(entries, size)  # the older ones, without
        self._limit = size  # of the newer ones
        self._rows = 1  # of the largest table

    def append(self, entry: Entry, rows: int = 0) -> None:
        """Add a step whose table has `rows` rows."""
        self._full.append(entry)
        if rows > self._rows:
            self._rows = rows
            self._limit = min(self.size, max(1, TABLE_BYTES // _table_bytes(entry, rows)))
        if len(self._full) > self._limit or self._slim:
            self._shrink()

    def _shrink(self) -> None:
        while len(self._full) > self._limit:
            oldest = self._full.popleft()
            if self._limit < self.size:
                self._slim.append(oldest.without_table())
        while self._slim and len(self._slim) + len(self._full) > self.size:
            self._slim.popleft()

    def resized(self, size: int) -> History:
        """The same steps in a ring of another size."""
        history = History(size, self._slim)
        for entry in self._full:
            history.append(entry, self._rows)
        return history

    def __len__(self) -> int:
        return len(self._slim) + len(self._full)

    def __iter__(self) -> Iterator[StepReport]:
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> StepReport: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepReport]: ...
    def __getitem__(self, index: int | slice) -> StepReport | list[StepReport]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"history holds {len(self)} reports, there is no [{index}]")
        ring, at = (self._slim, at) if at < len(self._slim) else (self._full, at - len(self._slim))
        entry = ring[at]
        if isinstance(entry, Healthy):
            entry = ring[at] = entry.report()
        return entry

    def __repr__(self) -> str:
        return f"History({len(self)} of at most {self.size} reports, {sum(r.skipped for r in self)} skipped)"

    def _repr_html_(self) -> str:  # notebooks call it
        from nanscan.reporting.html import history_html

        return history_html(self)

    def __getstate__(self) -> dict[str, Any]:
        slim = [entry.without_table() for ring in (self._slim, self._full) for entry in ring]
        return {"size": self.size, "entries": slim}

    def __setstate__(self, state: dict[str, Any]) -> None:
        History.__init__(self, state["size"], state["entries"])


def _table_bytes(entry: Entry, rows: int) -> int:
    scan = entry.scan if isinstance(entry, Healthy) else getattr(vars(entry).get("_source"), "scan", None)
    return int(getattr(scan, "nbytes", rows * ROW_BYTES))


class Record:
    """The counters and the ring of one guarded optimizer, and whoever wants to hear of each step.

    Attributes:
        steps: how many steps were recorded.
        skipped: how many of them were skipped.
        consecutive: how many were skipped in a row up to now.
        first_skipped: index of the first skipped one, None if there is none.
        bad_parameter_steps: after how many the parameters held a NaN or Inf (where that was looked at).
        spikes: how many were a spike (where that was looked for).
        dropped: how many micro-batches were given up.
        skipped_last: whether the last one was skipped.
        offenders: the names of the bad tensors of the last skipped steps.
        last_bad: the last step on which something was wrong, and what, in a few words; None if there is none.
        listener: is called with the report of every step; what it raises waits for `raise_failed`.
    """

    def __init__(self, size: int = 1024) -> None:
        self.steps = 0
        self.skipped = 0
        self.consecutive = 0
        self.first_skipped: int | None = None
        self.bad_parameter_steps = 0
        self.spikes = 0
        self.dropped = 0
        self.skipped_last = False
        self.history = History(size)
        self.offenders: deque[tuple[str, ...]] = deque(maxlen=OFFENDER_STEPS)
        self.last_bad: tuple[int, str] | None = None
        self.listener: Callable[[StepReport], Any] | None = None
        self._failed: Exception | None = None
        self._watchers: list[weakref.WeakMethod[Callable[[StepReport], Any]]] = []

    def watch(self, method: Callable[[StepReport], Any]) -> None:
        """Call a bound method with the report of every step on which something was bad, as long as its object lives."""
        self._watchers.append(weakref.WeakMethod(method))

    def start_over(self) -> None:
        """The run of skips ends here: weights and state were put back to a good moment."""
        self.consecutive = 0
        self.offenders.clear()

    def add_healthy(self, entry: Healthy, rows: int) -> None:
        """Note a step on which nothing was wrong and that nobody listens to; this is the hot path."""
        self.consecutive = 0
        self.skipped_last = False
        self.steps += 1
        self.history.append(entry, rows)

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
        self.offenders.append(tuple(dict.fromkeys(row.name for row in report.bad)))  # each once, on whichever ranks
        self._keep(report, rows)

    def _keep(self, report: StepReport, rows: int) -> None:
        self.steps += 1
        self._failed = None
        self.spikes += report.spike is not None
        self.dropped += len(report.dropped)
        wrong = trouble(report)
        if wrong:
            self.last_bad = report.step, wrong
        self.history.append(report, rows)
        if self.listener is not None:
            try:
                self.listener(report)
            except Exception as error:  # the step is to be finished first
                self._failed = error
        if self._watchers and (report.skipped or not report.finite or report.parameters):
            self._watchers = [watcher for watcher in self._watchers if watcher() is not None]
            for watcher in self._watchers:
                method = watcher()
                if method is not None:
                    method(report)

    def taken_failure(self) -> Exception | None:
        """What the listener has raised since the last call, None if nothing."""
        failed, self._failed = self._failed, None
        return failed

    def raise_failed(self) -> None:
        """The step is finished: raise what the listener has raised."""
        failed = self.taken_failure()
        if failed is not None:
            raise failed

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "listener": None, "_failed": None, "_watchers": []}


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
