"""`nanscan.watch`: which layer leaves its range first, seen before anything is NaN."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from nanscan.ranges.compiled import EagerSteps
from nanscan.ranges.hooks import ModuleHooks, RootEnd, RootStart
from nanscan.ranges.judge import Judge
from nanscan.ranges.log import RangeLog
from nanscan.ranges.names import innermost, is_scripted, module_names
from nanscan.ranges.record import Ring, StepRecord
from nanscan.ranges.recorder import Recorder
from nanscan.ranges.row import OutOfRange, RangeRow
from nanscan.ranges.stats import row_of
from nanscan.ranges.table import text_table

__all__ = ["Watch", "watch"]

KINDS = ("activation", "gradient")


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    history: int = 64,
    sample: int | None = 4096,
    log: str | os.PathLike[str] | None = None,
) -> Watch:
    """Watch the ranges of every module's activations and gradients, step by step.

    A step is one call of `model` in training mode with gradients enabled. Results do not change in any bit.

    Args:
        model: what is called in training; also wrapped in DistributedDataParallel. Modules added later aren't seen.
        every: measure the steps whose number it divides; the others cost next to nothing.
        history: of how many measured steps rows are kept.
        sample: without the native engine, zeros and underflows in a CPU tensor with more than twice as many elements
            are counted over about so many, evenly spread; None counts all. Everything else is over all elements.

        log: a path, to which rows are appended for `nanscan report`: those of the first 256 measured steps, then of
            ever fewer, and the first out of range. It can be the file that `wrap(..., log=)` writes.

    Returns:
        A `Watch`; `close()` it, or use it as a context manager.

    Raises:
        TypeError: `model` is not an `nn.Module`, or is a scripted one.
        ValueError: `every`, `history` or `sample` is below 1.
        OSError: `log` can't be written.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> with watch(model) as ranges:
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> [(row.module, row.kind) for row in ranges.rows()]
    [('0', 'activation'), ('1', 'activation'), ('1', 'gradient'), ('0', 'gradient')]
    >>> ranges.first_bad is None
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch needs an nn.Module, got a {type(model).__name__}")
    if is_scripted(innermost(model)):
        raise TypeError("a model made by torch.jit.script takes no hooks: watch the Python model it was made from")
    for name, value in (("every", every), ("history", history), ("sample", 1 if sample is None else sample)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: it must be a whole number of at least 1")
    return Watch(model, every, history, sample, None if log is None else RangeLog(log))


class Watch:
    """The ranges of a model's activations and gradients; made by `nanscan.watch`."""

    def __init__(
        self, model: nn.Module, every: int, history: int, sample: int | None, log: RangeLog | None = None
    ) -> None:
        self._ring = Ring(history)
        self._log = log
        self._judge = Judge()
        self._last: StepRecord | None = None
        self._first_bad: OutOfRange | None = None
        self._run_up: tuple[RangeRow, ...] = ()
        self._steps = 0  # once it is closed
        self._eager = EagerSteps(model, every)
        modules = list(module_names(model))
        own = ""
        if modules[0][1] is model:  # its own output is taken by the hook that ends the step
            own, _ = modules.pop(0)
        hooks = ModuleHooks(modules)
        self._recorder: Recorder | None = Recorder(every, self._ring, sample, hooks, self._begin, self._eager.leave)
        self._handles: list[Any] = [
            model.register_forward_pre_hook(RootStart(self._recorder)),
            model.register_forward_hook(RootEnd(self._recorder, own), always_call=True),
        ]

    @property
    def steps(self) -> int:
        """How many steps there were, measured or not."""
        return self._steps if self._recorder is None else self._recorder.steps

    @property
    def first_bad(self) -> OutOfRange | None:
        """The first row that left its range, with `.reason`; None if there is none."""
        self._settle(wait=True)
        return self._first_bad

    @property
    def run_up(self) -> tuple[RangeRow, ...]:
        """The rows of `first_bad`'s module and kind up to its step, oldest first; kept when the ring goes on."""
        self._settle(wait=True)
        return self._run_up

    def rows(self, module: str | None = None, kind: str | None = None, last: int | None = None) -> list[RangeRow]:
        """One row per module, kind and step, in the order in which they were measured.

        Args:
            module: only this module's, by its dotted path.
            kind: only `"activation"` or `"gradient"`.
            last: only those of the last so many measured steps.

        Raises:
            ValueError: there is no such kind, or `last` is negative.
        """
        if kind is not None and kind not in KINDS:
            raise ValueError(f"kind={kind!r}: it must be 'activation' or 'gradient'")
        if last is not None and last < 0:
            raise ValueError(f"last={last}: it must be a number of steps, 0 or more")
        self._settle(wait=True)
        records = list(self._ring)
        records = records if last is None else records[len(records) - min(last, len(records)) :]
        return [
            row_of(record.step, name, its_kind, stats)
            for record in records
            for (name, its_kind), stats in list(record.stats.items())
            if module in (None, name) and kind in (None, its_kind)
        ]

    def table(self, module: str | None = None, kind: str | None = None, last: int | None = 1) -> str:
        """The rows as a text table; by default those of the last measured step."""
        return text_table(self.rows(module, kind, last))

    def describe(self) -> str:
        """What there is to say: the first row out of range and its run-up, or that there is none."""
        bad = self.first_bad
        if bad is None:
            return f"nothing left its range in {self.steps} steps"
        return f"{bad.describe()}\n{text_table(self._run_up)}"

    def reset_first_bad(self) -> None:
        """Forget `first_bad`, so that the next row to leave its range is named."""
        self._settle(wait=True)
        self._first_bad, self._run_up = None, ()

    def close(self) -> None:
        """Take all hooks off the model; rows can still be read."""
        if self._recorder is None:
            return
        self._steps = self._recorder.steps
        self._recorder.close()
        self._recorder = None
        self._settle(wait=True)
        self._note_last()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._eager.leave()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._recorder is not None else "closed"
        return f"<nanscan.Watch, {state}: {self.steps} steps>"

    def _repr_html_(self) -> str:  # notebooks call it
        from nanscan.reporting.html import watch_html

        return watch_html(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle holds what was found, and watches nothing."""
        self._settle(wait=True)
        records = [(record.step, dict(record.stats)) for record in self._ring]
        return {"records": records, "first_bad": self._first_bad, "run_up": self._run_up, "steps": self.steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._ring, self._judge, self._recorder = Ring(max(1, len(state["records"]))), Judge(), None
        for step, stats in state["records"]:
            self._ring.begin(step).stats.update(stats)
        self._last, self._log = None, None
        self._first_bad, self._run_up, self._steps = state["first_bad"], state["run_up"], state["steps"]

    def _begin(self) -> None:
        """Before each measured step: the one before is over, so far as its numbers are there."""
        self._settle(wait=self._ring.must_wait())
        self._eager.enter()

    def _settle(self, wait: bool) -> None:
        """Judge what is new, in the order of steps; without `wait` as far as the devices have come."""
        for record in self._ring.touched():
            record.touched = False  # first, so that what is added meanwhile is seen the next time
            record.send()
            if not record.settle(wait):
                record.touched = True
                return
            if self._last is not None and record.step > self._last.step and self._first_bad is None:
                self._judge.accept(self._last)
            if self._last is not None and record.step > self._last.step:
                self._note_last()
            if self._last is None or record.step > self._last.step:
                self._last = record
            bad = self._judge.first_bad(record) if record.fresh else None
            if bad is not None and self._first_bad is None:
                self._first_bad, self._run_up = bad, self._rows_up_to(bad)
                if self._log is not None:
                    self._log.note_bad(bad)

    def _note_last(self) -> None:
        """The last step is over: its rows go to the log."""
        if self._log is not None and self._last is not None:
            self._log.note_step(self._last)

    def _rows_up_to(self, bad: OutOfRange) -> tuple[RangeRow, ...]:
        key = (bad.module, bad.kind)
        records = [record for record in self._ring if record.step <= bad.step and key in record.stats]
        return tuple(row_of(record.step, *key, record.stats[key]) for record in records)
