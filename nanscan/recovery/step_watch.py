"""What happened in a step, and whether it is time to go back: bad steps in a row, a bad loss, bad weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanscan.guard import GuardedOptimizer
from nanscan.recovery.finite import FiniteCheck
from nanscan.recovery.record import Trouble
from nanscan.report import Report, StepReport, TensorReport

__all__ = ["StepWatch", "listed"]

_KEPT_BATCHES = 4096


class StepWatch:
    """Looks at each step of a guarded optimizer (by its own reports) or of a plain one (by the weights).

    Args:
        guard: the guarded optimizer, or None.
        check: of the training state.
        scaler: the gradient scaler, or None.
        patience: so many bad steps in a row are too many.
        repair: is given bad buffers when the weights are good; returns True if it has put these buffers back.
    """

    def __init__(
        self,
        guard: GuardedOptimizer | None,
        check: FiniteCheck,
        scaler: Any,
        patience: int,
        repair: Callable[[Sequence[TensorReport]], bool],
    ) -> None:
        self._guard = guard
        self._check = check
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._patience = patience
        self._repair = repair
        self._heard: list[StepReport] = []
        self._batches: dict[int, Any] = {}  # step -> the name of its batch
        self._plain_steps = 0
        self._run: list[int] = []  # the present run of bad steps that count
        self._last_bad: int | None = None
        self._bad_scale: float | None = None  # the loss scale at the last bad step of the run
        self._scale = self._present_scale()
        if guard is not None:
            guard._record.watch(self._hear)

    def _hear(self, report: StepReport) -> None:
        if not (report.skipped and report.spike is not None):  # weights and buffers are as good as before
            self._heard.append(report)

    @property
    def in_bad_run(self) -> bool:
        """True if the last step was a bad one."""
        return self._last_bad is not None and self._last_bad == self._step

    @property
    def _step(self) -> int:
        """The number of the last step."""
        return self._plain_steps - 1 if self._guard is None else self._guard._steps - 1

    def look(self, loss: Tensor | float | None, batch: Any, wait: bool) -> Trouble | None:
        """The trouble that the last step brought, None if it is well.

        Args:
            loss: of this step, if it is to be looked at.
            batch: its name; None: it has none.
            wait: wait for the steps whose answer is still on the device.
        """
        bad_loss = loss is not None and not _is_finite(loss)
        if self._guard is None:
            self._plain_steps += 1
        else:
            self._guard._settle(wait=wait or bad_loss)
        self._note_batch(batch)
        heard, self._heard = self._heard, []
        for report in heard:
            trouble = self._bad_step(report)
            if trouble is not None:
                return trouble
        trouble = self._plain_step() if self._guard is None else self._after_drops(self._guard)
        if trouble is not None:
            return trouble
        skipped = any(report.skipped and report.step == self._step for report in heard)
        return self._bad_loss(loss) if bad_loss and not skipped else None

    def forget(self) -> None:
        """The state was put back: what was noted about the steps since is over."""
        self._heard.clear()
        self._run.clear()
        self._last_bad = self._bad_scale = None
        self._batches.clear()
        self._scale = self._present_scale()

    def weights(self, rows: tuple[TensorReport, ...]) -> Trouble:
        """The trouble that `rows` are bad; most likely the step before the first sign did it."""
        step = self._run[0] - 1 if self._run else self._step
        return Trouble("weights", f"the state is not finite: {listed(rows)}", rows, self._named([step]))

    # ---- guarded -----------------------------------------------------------------------------------------------------

    def _bad_step(self, report: StepReport) -> Trouble | None:
        if report.parameters and not report.skipped:
            return self.weights(self._check.bad() or report.parameters)
        counts = self._continue_run(report.step)
        rows = self._check.bad()
        if rows and not (all(row.kind == "buffer" for row in rows) and report.skipped and self._repair(rows)):
            if not report.skipped:  # the step that was taken although it was bad
                self._run = []
            return self.weights(rows)
        return self._too_many(report) if counts else None

    def _after_drops(self, guard: GuardedOptimizer) -> Trouble | None:
        """A good step without its bad micro-batches: only buffers can be bad, their forward pass was run."""
        last = guard._last
        if not (isinstance(last, StepReport) and last.dropped and last.finite):
            return None
        rows = self._check.bad()
        if not rows or (all(row.kind == "buffer" for row in rows) and self._repair(rows)):
            return None
        return self.weights(rows)

    def _continue_run(self, step: int) -> bool:
        """Note a bad step; False if it is one of the scaler's search and does not count."""
        if self._last_bad is None or step > self._last_bad + 1:
            self._run, self._bad_scale = [], None
        self._last_bad = step
        if self._is_search():
            self._run = []
            return False
        self._run.append(step)
        return True

    def _is_search(self) -> bool:
        """True if the scaler may still find the scale that fits: it is above 1, and lower than at the last bad step.

        A scaler starts at 65,536 and halves its scale with each step that it skips: sixteen bad steps in a row are
        healthy then. Below 1 the true gradients don't fit; a scale that doesn't fall any more won't find anything.
        """
        if self._scaler is None:
            return False
        scale, before = self._present_scale(), self._bad_scale
        self._bad_scale = scale
        return scale > 1.0 and (before is None or scale < before)

    def _present_scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _too_many(self, report: Report | None) -> Trouble | None:
        if len(self._run) < self._patience:
            return None
        last = "the gradient scaler skipped them at a loss scale below 1" if report is None else report.describe()
        count = len(self._run)
        reason = f"{count} bad steps in a row; the last: {last}" if count > 1 else f"a bad step: {last}"
        return Trouble("skips", reason, () if report is None else report.bad, self._named(self._run))

    # ---- plain -------------------------------------------------------------------------------------------------------

    def _plain_step(self) -> Trouble | None:
        """The weights after a step of a plain optimizer, and the steps that its scaler left out."""
        if self._check.bad_weights():
            return self.weights(self._check.bad())
        before, self._scale = self._scale, self._present_scale()
        if self._scale < before and self._continue_run(self._step):
            return self._too_many(None)
        return None

    def _bad_loss(self, loss: Any) -> Trouble:
        if rows := self._check.bad():
            return self.weights(rows)
        value = loss.detach().flatten().tolist()[:4] if isinstance(loss, Tensor) else [loss]
        text = ", ".join(f"{number:g}" for number in value)
        return Trouble("loss", f"the loss is {text}", (), self._named([self._step]))

    # ---- batches -----------------------------------------------------------------------------------------------------

    def _note_batch(self, batch: Any) -> None:
        if batch is None:
            return
        self._batches[self._step] = batch
        if len(self._batches) > _KEPT_BATCHES:
            del self._batches[next(iter(self._batches))]

    def _named(self, steps: Sequence[int]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(self._batches[step] for step in steps if step in self._batches))


def listed(rows: Sequence[TensorReport], limit: int = 4) -> str:
    """The rows in words, at most `limit` of them by name."""
    more = f"; and {len(rows) - limit} more" if len(rows) > limit else ""
    return "; ".join(row.describe() for row in rows[:limit]) + more


def _is_finite(loss: Tensor | float) -> bool:
    if isinstance(loss, Tensor):
        return bool(torch.isfinite(loss.detach()).all())
    return math.isfinite(loss)
