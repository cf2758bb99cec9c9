"""`check_microbatch`: which micro-batch of an accumulation brought the NaN, and a way to give up only that one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanscan import engine, messages
from nanscan.checks import dense_bad_rows
from nanscan.distributed.agreement import Agreement
from nanscan.distributed.held_back import note_held_back
from nanscan.engine.result import BadInput, EngineScan
from nanscan.kept_gradients import KeptGradients
from nanscan.losses import as_loss, loss_labels
from nanscan.microbatch_window import Place, Window, counts
from nanscan.names import Joined
from nanscan.replicas import average_gradients, has_replicas
from nanscan.report import Label, Report, StepReport, TensorReport
from nanscan.shows_inner import ShowsInner

__all__ = ["MicrobatchReport", "Microbatches"]


@dataclass(frozen=True)
class MicrobatchReport(Report):
    """What one micro-batch brought.

    Attributes:
        microbatch: its index in the window, from 0.
        step: index of the optimizer step that the window is for.
        dropped: True if it was given up: the gradients are what they were before it.
        stale: tensors that held a NaN or Inf before this micro-batch already. They are not in `bad`.

    `finite`, `nan_count`, `inf_count` and `bad` are about what is new with this micro-batch; norms and `tensors` are of
    the accumulated gradients as they were found, times the loss scale where there is one.
    """

    microbatch: int = 0
    step: int = 0
    dropped: bool = field(default_factory=lambda: False)
    stale: tuple[TensorReport, ...] = field(default_factory=tuple)

    def describe(self, limit: int = 5) -> str:
        """One line: the micro-batch, and the tensors in which it brought a NaN or Inf."""
        return f"micro-batch {self.microbatch} of step {self.step}: {super().describe(limit)}"


class Microbatches(ShowsInner):
    """Accumulation windows: the checks between two steps, and what the step makes of them."""

    _kept: KeptGradients | None = None
    _drop_warned = False  # this run of windows with drops has had its warning

    def check_microbatch(
        self,
        loss: Tensor | float | None = None,
        *,
        drop: bool = False,
        weight: float = 1.0,
        before_backward: bool = False,
        scaler: Any = None,
    ) -> MicrobatchReport:
        """Look at what the last micro-batch of an accumulation added to the gradients; call it after each `backward()`.

        A NaN stays in an accumulated gradient, so it belongs to the first micro-batch after which it is seen; later
        ones are not blamed for it. The window ends with `step()`, taken or skipped, or with `zero_grad()`.

        Args:
            loss: of this micro-batch, unscaled: a tensor of any shape or a number; None: what `observe` got since the
                last call, if anything. It is looked at too; a bad one that is not dropped has the step judged as bad.
                If every call gives one and nothing is observed, their mean is the step's `loss`, in the log too: of
                those that are not dropped, weighted by `weight`. So give it as you want to see it, not divided by N.
            drop: give up a bad micro-batch: the gradients become what they were before it, and at the step the sum of
                the others is multiplied by N / (N - dropped), which is right where each loss was divided by N. Give
                it in every call of a window. After each good micro-batch the gradients are copied (as much memory as
                they take, used again in the next window; one read and one write).
            weight: this micro-batch's share of the window, such as its number of tokens; the rest is multiplied by the
                sum of all weights / the sum of those kept. 0 in every call: the rest is left as it is.
            before_backward: the call comes before `backward()`: only the loss is looked at, and in the first
                call of a window the gradients, to tell what is left over from earlier (`stale`). Skip the `backward()`
                if the report is not finite and `drop` was given. A second call after the backward is for the same
                micro-batch; without it, the micro-batch counts with `weight` and its gradients are seen at the step.
            scaler: a `torch.amp.GradScaler` in use. It hears of an overflow that was dropped, so that `update()` lowers
                the scale although the step was taken. A `nanscan.GradScaler` hears of it by itself.

        Returns:
            A `MicrobatchReport`; `finite` says whether this micro-batch brought a NaN or Inf.

        Raises:
            TypeError: if `loss` is neither a tensor nor a number.
            ValueError: if `weight` is negative, or `before_backward` comes without a loss in the middle of a window.
            NotImplementedError: for `drop=True` where ranks can't agree (no `process_group`) or `fully_shard` holds
                the gradients back (`set_requires_gradient_sync(False)`).

        With a `process_group` each call makes one small collective, so that all ranks drop the same micro-batches;
        every rank must call it equally often.

        >>> import torch, nanscan
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = nanscan.wrap(torch.optim.SGD([("w", weight)], lr=1.0))
        >>> for x in (1.0, 3.0):
        ...     loss = (weight * x).sum() / 2
        ...     loss.backward()
        ...     report = optimizer.check_microbatch(loss)
        >>> report.microbatch, report.finite, report.norm
        (1, True, 2.0)
        >>> optimizer.step(); optimizer.last_report.microbatches
        2
        """
        if not weight >= 0:
            raise ValueError(f"weight must be 0 or more, such as the number of tokens, got {weight}")
        losses = [] if loss is None else [as_loss(loss)]
        if drop and self._agreement is None:
            _refuse_lone_rank(self._names.model, self._flat_params())
        note_held_back(self, drop, not before_backward)
        self._settle(wait=True)
        first = self._window is None
        if before_backward and not losses and not first:
            raise ValueError("before_backward=True in the middle of a window looks at the loss only: give it")
        window = self._window = self._window or self._new_window()
        if loss is None and not before_backward:
            losses = self._losses[window.observed :]
        if before_backward:
            return self._look_before(window, first, losses, drop, weight)
        if not window.open:
            window.weights.append(float(weight))
        if loss is not None:
            window.losses[len(window.weights) - 1] = losses[0]
        window.open = False
        return self._look_after(window, first, losses, drop, scaler)

    # ---- the two kinds of look ---------------------------------------------------------------------------------------

    def _new_window(self) -> Window:
        self._kept = self._kept or KeptGradients()
        self._kept.start()
        self._plain = False
        return Window()

    def _look_before(
        self, window: Window, first: bool, losses: list[Tensor], drop: bool, weight: float
    ) -> MicrobatchReport:
        """Only the loss is looked at, and at the beginning of a window what is in the gradients already."""
        if losses:
            window.weights.append(float(weight))
            window.losses[len(window.weights) - 1] = losses[0]
            window.open = True
        scan, labels = self._look(losses, gradients=first)
        rows = self._bad_places(scan, labels)
        stale = {place: row for place, row in rows.items() if row.kind != "loss"}
        if first:
            window.note_bad(stale)
        fresh = tuple(row for row in rows.values() if row.kind == "loss")
        report = self._report_of(window, scan, labels, fresh, tuple(stale.values()), bool(fresh) and drop)
        if fresh:
            self._note_bad(window, report, scan, losses)
        return report

    def _look_after(
        self, window: Window, first: bool, losses: list[Tensor], drop: bool, scaler: Any
    ) -> MicrobatchReport:
        """The loss, and the gradients with everything that is accumulated in them."""
        assert self._kept is not None
        kept, params, index = self._kept, self._flat_params(), len(window.weights) - 1
        scan, labels = self._look(losses)
        rows = self._bad_places(scan, labels)
        if first and rows:
            leftover = kept.leftover(params) if self._agreement is None else frozenset()
            window.note_bad({place: row for place, row in rows.items() if place[0] in leftover})
        fresh = _grown(rows, window.bad_rows, scan.nan_count + scan.inf_count - window.bad_count)
        stale = tuple(row for place, row in rows.items() if row not in fresh)
        given_up = index in window.dropped  # before its backward, which was run nevertheless
        drops = given_up or (bool(fresh) and drop and window.saved >= index)
        report = self._report_of(window, scan, labels, fresh, stale, drops)
        if drops:
            kept.restore(params)
            window.overflowed |= all(row.kind != "loss" for row in fresh) and not given_up
            window.scaler = scaler if scaler is not None else window.scaler
        else:
            in_gradients = {place: row for place, row in rows.items() if row.kind != "loss"}
            window.note_bad(in_gradients, None if self._agreement is None else scan.nan_count + scan.inf_count)
        if fresh and not given_up:
            self._note_bad(window, report, scan, losses)
        elif drop and not fresh and not given_up:
            kept.save(params)
            window.saved = index + 1
        window.observed = len(self._losses)
        return report

    def _look(self, losses: list[Tensor], gradients: bool = True) -> tuple[EngineScan, Sequence[Label]]:
        """Scan the loss and, unless there is no need to, the gradients; on every rank of a process group."""
        groups = self.optimizer.param_groups
        try:
            scan = self._scanned(losses) if gradients else engine.scan([None] * self._params(), losses)
        except BadInput as error:
            if self._agreement is not None:
                self._agreement.give_up(self._params(), self._steps)
            raise self._explained(error) from None
        labels: Sequence[Label] = self._names.labels(scan.signature if gradients else 0, groups)
        labels = Joined(labels, loss_labels(losses)) if losses else labels
        return (scan, labels) if self._agreement is None else self._shared(self._agreement, scan, labels)

    def _shared(
        self, agreement: Agreement, scan: EngineScan, labels: Sequence[Label]
    ) -> tuple[EngineScan, Sequence[Label]]:
        """What all ranks have found: within an accumulation the gradients may be each rank's own."""
        groups = self.optimizer.param_groups
        bad = [] if scan.finite else dense_bad_rows(scan, labels, groups)
        known = self._names.refresh(self._names.signature, groups)
        agreed, labels, _ = agreement.scan(scan, bad, labels, self._flat_params(), known, self._steps, False)
        return agreed, labels

    def _bad_places(self, scan: EngineScan, labels: Sequence[Label]) -> dict[Place, TensorReport]:
        """The bad rows by position (and rank)."""
        if scan.finite:
            return {}
        reports = Report.from_scan(scan, labels, self._places(scan)).bad
        return {(row.position, report.rank): report for row, report in zip(scan.bad_rows(), reports, strict=True)}

    def _report_of(
        self,
        window: Window,
        scan: EngineScan,
        labels: Sequence[Label],
        fresh: tuple[TensorReport, ...],
        stale: tuple[TensorReport, ...],
        dropped: bool,
    ) -> MicrobatchReport:
        return MicrobatchReport.from_scan(
            scan,
            labels,
            self._places(scan),
            finite=not fresh,
            bad=fresh,
            nan_count=sum(row.nan_count for row in fresh),
            inf_count=sum(row.inf_count for row in fresh),
            microbatch=max(len(window.weights) - 1, 0),
            step=self._steps,
            dropped=dropped,
            stale=stale,
        )

    def _note_bad(self, window: Window, report: MicrobatchReport, scan: EngineScan, losses: list[Tensor]) -> None:
        """A micro-batch brought something bad: it is given up, or the step will have to judge it."""
        window.last_bad = (report, scan)
        if not report.dropped:
            if window.first_bad is None:
                window.first_bad = report.microbatch
                if any(row.kind == "loss" for row in report.bad) and len(self._losses) == window.observed:
                    self._losses += losses
            return
        window.dropped.append(report.microbatch)
        window.saved = report.microbatch + 1
        window.buffers = self._bad_buffers()
        del self._losses[window.observed :]
        if not self._drop_warned:
            self._drop_warned = True
            if self._recorder is not None:
                vars(report)["origin"] = self._recorder.look()
            messages.warn(messages.dropped_microbatch(report.describe(), report.origin, window.buffers))

    # ---- the end of a window -----------------------------------------------------------------------------------------

    def window_step(self, kwargs: dict[str, Any], scale: float, flagged: bool) -> Any:
        """The step that ends a window."""
        window = self._end_window()
        assert window is not None and self._kept is not None
        self._drop_warned = self._drop_warned and bool(window.dropped)
        self._window_facts = window.facts(observed=bool(self._losses))
        try:
            if window.last_bad is not None and (window.nothing_left or not self._averaged(window)):
                return self._skip_without_microbatch(*window.last_bad, scale)
            if window.factor != 1.0:
                engine.scale_grads_(self._grad_groups(), window.factor)
            return self.host_step(kwargs, scale, flagged)
        finally:
            self._window_facts = {}
            self._kept.end(self._flat_params(), self._still_bad())
            self._tell_of_overflow(window)

    def _skip_without_microbatch(self, last: MicrobatchReport, scan: EngineScan, scale: float) -> Any:
        """Nothing is left to step with."""
        found = {item.name: getattr(last, item.name) for item in dataclasses.fields(Report)}
        known = {"step": self._steps, "time": time.time(), "action": "undecided", **self._window_facts}
        report = self._last = StepReport(**found, **known)
        if self.scaled_step is not None:
            vars(report)["loss_scale"] = float(self.scaled_step.scale)
            self.scaled_step.explain(report)
        self._steps += 1
        self._losses.clear()  # of micro-batches that were dropped
        action = self.decide(report)
        return self.refuse(report, "raise" if action == "raise" else "skip", scan, scale)

    def _averaged(self, window: Window) -> bool:
        """Average over the ranks what DistributedDataParallel has not, because it would have in a dropped backward.

        False if that is impossible. Where it has been done, the mean of equal gradients changes nothing.
        """
        if self._agreement is None or not window.dropped or not has_replicas(self._names.model):
            return True
        return average_gradients(self._flat_params(), self._agreement.group)

    def _tell_of_overflow(self, window: Window) -> None:
        """Let the gradient scaler find the overflow of a dropped micro-batch in this step, as it would have without."""
        if self.scaled_step is not None:
            self.scaled_step.overflow = window.overflowed or self.scaled_step.overflow
            return
        scaler = window.scaler
        if scaler is not None and scaler.is_enabled():
            flags = scaler._found_inf_per_device(self)
            if window.overflowed or not flags:  # torch's update() fails where nothing is noted
                device = next(iter(flags), self._flat_params()[0].device)
                flags[device] = torch.full((), float(window.overflowed), dtype=torch.float32, device=device)
        elif window.nothing_left and "grad_scale" in self.__dict__:
            raise RuntimeError(messages.scaler_needed())

    def _still_bad(self) -> list[int]:
        """The positions of gradients that the step has left with a NaN or Inf in them."""
        last = self._last
        if not isinstance(last, StepReport) or last.action not in ("raise", "warn"):
            return []
        return [row.position for row in self._scanned([]).bad_rows()]

    def _flat_params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def _grown(rows: dict[Place, TensorReport], before: dict[Place, int], more: int) -> tuple[TensorReport, ...]:
    """The rows that hold more NaN and Inf than before.

    Of other ranks only the first bad row is known: `more`, by how much the total has grown, is the same on every rank,
    so that all come to the same decision.
    """
    now = counts(rows)
    if more <= 0:
        return ()
    return tuple(row for place, row in rows.items() if now[place] > before.get(place, 0)) or tuple(rows.values())


def _refuse_lone_rank(model: Any, params: Sequence[Tensor]) -> None:
    """Ranks that decide alone would drop different micro-batches of one step."""
    parallel = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    if parallel or any(hasattr(p, "to_local") for p in params):
        raise NotImplementedError(
            "check_microbatch(drop=True): the gradients of this micro-batch are not the same on every rank, and each "
            "rank would decide for itself which to drop. Leave process_group=False out of nanscan.wrap(...), then all "
            "ranks drop the same ones"
        )
