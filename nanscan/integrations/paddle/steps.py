"""How one step of a guarded Paddle optimizer goes: gather and scan, decide, apply, record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import paddle

from nanscan import messages
from nanscan.engine.result import BadInput, EngineScan
from nanscan.errors import NonFiniteError, TrainingDiverged
from nanscan.history import Healthy, Record, repeat_offender
from nanscan.integrations.paddle.checks import bad_buffers, bad_parameters
from nanscan.integrations.paddle.clip import global_limit, without_global_clip
from nanscan.integrations.paddle.engine import scale_, scan_tensors, zero_nonfinite_
from nanscan.integrations.paddle.gradients import Gradients, gather, writable
from nanscan.integrations.paddle.names import Names
from nanscan.integrations.paddle.tensors import label_of, sparse_places
from nanscan.policy import Action, Policy, clip_factor
from nanscan.report import Label, StepReport

__all__ = ["Steps"]


class Steps:
    """The steps of one guarded optimizer.

    Args:
        optimizer: the inner one, a `paddle.optimizer.Optimizer`.
        names: of its parameters.
        policy: the options.
    """

    def __init__(self, optimizer: Any, names: Names, policy: Policy) -> None:
        self.optimizer = optimizer
        self.names = names
        self.policy = policy
        self.record = Record(policy.history)
        self.last: StepReport | Healthy | None = None
        self.found_inf: Any = None  # what a gradient scaler handed over for the present step
        self._losses: list[Any] = []
        self._run_warned = False  # this run of bad steps has had its warning
        self._bad_params_warned = False
        self._hinted = False

    def observe(self, loss: Any) -> None:
        """Let the loss join the next scan."""
        if isinstance(loss, paddle.Tensor):
            loss = loss.detach()
            self._losses.append(loss if loss.is_floating_point() or loss.is_complex() else loss.astype("float64"))
        elif isinstance(loss, Real):  # NumPy's scalars too
            self._losses.append(paddle.to_tensor(float(loss), dtype="float64"))
        else:
            raise TypeError(f"loss must be a paddle.Tensor or a number, got {type(loss).__name__}")

    def step(self, act: Callable[[], Any], parameters: Iterable[Any] | None = None) -> Any:
        """One step; `act` is the real one, of the inner optimizer. Returns what it returned, None for a skipped one."""
        found_inf, self.found_inf = self.found_inf, None
        losses, self._losses = self._losses, []
        gradients = gather(self.optimizer, parameters)
        scan, labels = self._scan(gradients, losses)
        flagged = found_inf is not None and bool(found_inf)
        if flagged or not scan.finite:
            return self._bad_step(scan, labels, gradients, losses, flagged, act)
        factor = self._clip(scan, gradients)
        result = self._act(act)
        self._note_healthy(Healthy(scan, labels, self.record.steps, time.time(), factor), losses)
        if not scan.count and not gradients.others and not self._hinted:
            self._hinted = True
            messages.warn(messages.no_gradients(self.record.steps - 1), UserWarning)
        return result

    # ---- the parts of a step -----------------------------------------------------------------------------------------

    def _scan(self, gradients: Gradients, losses: Sequence[Any]) -> tuple[EngineScan, list[Label]]:
        labels = self.names.labels(gradients)
        try:
            scan = scan_tensors(gradients.to_clip, [*gradients.others, *losses])
        except BadInput as error:
            at = error.position
            name = f"grad of '{labels[at].names[0]}'" if at < len(labels) else "the observed loss"
            raise error.kind(f"{name} {error.reason}") from None
        return scan, [*labels, *_loss_labels(losses)] if losses else labels

    def _limit(self) -> float | None:
        """The largest norm of this step: of `clip_norm` and the optimizer's own ClipGradByGlobalNorm the smaller."""
        limits = [limit for limit in (self.policy.fixed_norm, global_limit(self.optimizer)) if limit is not None]
        return min(limits, default=None)

    def _clip(self, scan: EngineScan, gradients: Gradients) -> float:
        """Clamp the gradients to `clip_value`, clip their norm; returns the clip factor."""
        limit, norm, value = self._limit(), scan.finite_norm, self.policy.clip_value
        clamp = value is not None and scan.inf_norm > value
        if not clamp and clip_factor(norm, limit) == 1.0:
            return 1.0
        dense = writable(gradients.params[: gradients.clipped], gradients.to_clip)
        if clamp:
            scale_(dense, 1.0, value)
            norm = scan_tensors(dense).finite_norm
        factor = clip_factor(norm, limit)
        if factor != 1.0:
            scale_(dense, factor)
        return factor

    def _act(self, act: Callable[[], Any]) -> Any:
        with without_global_clip(self.optimizer):
            return act()

    def _bad_step(
        self,
        scan: EngineScan,
        labels: Sequence[Label],
        gradients: Gradients,
        losses: Sequence[Any],
        flagged: bool,
        act: Callable[[], Any],
    ) -> Any:
        places = sparse_places(scan, [*gradients.grads, *losses])
        report = StepReport.from_scan(
            scan, labels, places, step=self.record.steps, time=time.time(), action="undecided", skipped=False,
            clip_factor=1.0, loss=_mean(losses),
        )  # fmt: skip
        self.last = report
        action = self.policy.decide(report)
        if flagged and action != "raise":
            action = "skip"  # Paddle's unscaling has set every gradient after the first bad one to 0
        if action in ("skip", "raise"):
            return self._refuse(report, action, scan, gradients)
        factor = self._repair(scan, gradients) if action == "zero" else 1.0
        result = self._act(act)
        vars(report).update(action=action, clip_factor=factor)
        self._finish(report, scan.count)
        return result

    def _repair(self, scan: EngineScan, gradients: Gradients) -> float:
        """Set the bad elements to 0, then clip what is left."""
        zero_nonfinite_(writable(gradients.params, gradients.grads))
        again = gather(self.optimizer, gradients.params)  # merged rows are new gradients
        return self._clip(scan_tensors(again.to_clip), again)

    def _refuse(self, report: StepReport, action: Action, scan: EngineScan, gradients: Gradients) -> None:
        """Do not step: record it, clear the gradients or raise."""
        vars(report).update(action=action, skipped=True, buffers=bad_buffers(self.names.layer))
        if action == "skip":
            clear(gradients.params)
        diverged = self._note_skip(report, scan.count)
        if action == "raise":
            raise NonFiniteError(messages.bad_step(report), report) from self.record.taken_failure()
        if diverged is not None:
            raise diverged from self.record.taken_failure()
        self.record.raise_failed()

    # ---- the record --------------------------------------------------------------------------------------------------

    def _note_healthy(self, healthy: Healthy, losses: Sequence[Any]) -> None:
        every = self.policy.check_params_every
        if self.record.listener is None and not every:
            self.last = healthy
            self._run_warned = False
            self.record.add_healthy(healthy, len(healthy.labels))
        else:
            self.last = report = healthy.report()
            vars(report)["loss"] = _mean(losses)
            self._finish(report, healthy.scan.count)

    def _note_skip(self, report: StepReport, rows: int) -> TrainingDiverged | None:
        """Count, record and, once per run of skips, warn; returns the error that ends the run."""
        record = self.record
        record.add_skipped(report, rows)
        offender = repeat_offender(record.offenders)
        if report.action == "skip" and record.consecutive == self.policy.max_consecutive_skips:
            return TrainingDiverged(messages.diverged(report, record.consecutive, offender), report)
        if report.action == "skip" and not self._run_warned:
            messages.warn(messages.bad_step(report, offender=offender))
        self._run_warned = True
        return None

    def _finish(self, report: StepReport, rows: int) -> None:
        """What follows a real step: the check of the parameters, the record, the warning."""
        every = self.policy.check_params_every
        due = every and (report.step + 1) % every == 0
        if due:
            vars(report)["parameters"] = bad_parameters(self.optimizer, self.names)
        self.record.add(report, rows)
        if report.action == "step":
            self._run_warned = False
        elif not self._run_warned:
            self._run_warned = True
            messages.warn(messages.bad_step(report))
        if due:
            self._judge_parameters(report)
        self.record.raise_failed()

    def _judge_parameters(self, report: StepReport) -> None:
        """A weight is NaN or Inf: raise or warn, as `on_nonfinite` says as far as that is still possible."""
        if not report.parameters:
            self._bad_params_warned = False
            return
        self.record.bad_parameter_steps += 1
        text = messages.bad_parameters(report, ())
        if self.policy.decide(report) == "raise":
            raise NonFiniteError(text, report) from self.record.taken_failure()
        if not self._bad_params_warned:
            self._bad_params_warned = True
            messages.warn(text)


def clear(params: Iterable[Any]) -> None:
    """Give the gradients up, as `clear_grad(set_to_zero=False)` does: a NaN that stayed would join the next sum."""
    for param in params:
        param.clear_gradient(False)
        if getattr(param, "main_grad", None) is not None:
            param.main_grad = None


def _mean(losses: Sequence[Any]) -> float | None:
    """Of the observed losses, for the report; None if there is none, or one is complex."""
    if not losses or any(loss.is_complex() for loss in losses):
        return None
    return sum(float(loss.astype("float64").mean()) for loss in losses) / len(losses)


def _loss_labels(losses: Sequence[Any]) -> list[Label]:
    if len(losses) == 1:
        return [label_of(losses[0], ("loss",), "loss")]
    return [label_of(loss, (f"loss[{i}]",), "loss") for i, loss in enumerate(losses)]
