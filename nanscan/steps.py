"""How one step goes: gather and scan, decide, apply, record. `nanscan.guard` gives it its public face."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanscan import engine, messages
from nanscan.checks import suspects
from nanscan.clipping.limits import limits_for
from nanscan.closure import step_with_closure
from nanscan.deferred_steps import DeferredSteps
from nanscan.device_steps import DeviceSteps, Unscaled
from nanscan.distributed.alone import note_alone
from nanscan.engine.result import BadInput, EngineScan
from nanscan.errors import NonFiniteError, TrainingDiverged
from nanscan.history import Healthy, Record, repeat_offender
from nanscan.losses import as_loss, loss_labels, mean_loss
from nanscan.names import Joined, Names
from nanscan.policy import Action, Policy
from nanscan.report import Label, StepReport
from nanscan.scaling.judge import dead_scale
from nanscan.scaling.scaled_step import ScaledStep
from nanscan.scaling.torchs_scaler import handed_over
from nanscan.state_making import only_makes_state

if TYPE_CHECKING:
    from nanscan.microbatch_window import Window
    from nanscan.origin.recorder import Recorder

__all__ = ["GuardedSteps"]


class GuardedSteps(DeferredSteps):
    """The steps of a guarded optimizer: its state of the moment and the way of one step."""

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then calls step() on a bad step too
    scaled_step: ScaledStep | None = None  # what a nanscan.GradScaler tells while it makes this step

    def __init__(self, optimizer: torch.optim.Optimizer, names: Names, record: Record, policy: Policy) -> None:
        # Not Optimizer.__init__: it would patch step() once more and own a second set of groups and hooks.
        self.optimizer = optimizer
        self._names = names
        self._record = record
        self._steps = record.steps
        self._last: StepReport | Healthy | None = None
        self._hinted = False
        self._losses: list[Tensor] = []
        self._reported_losses: list[Tensor] = []  # of the present step, for its report
        self._divisor = 1.0
        self._divisor_tensor: Tensor | None = None
        self._device_steps = DeviceSteps()
        self._deferred: bool | None = None if torch.version.cuda else False  # None: where it can
        self._defer_plan: tuple[object, bool] = (None, False)
        self._placed: tuple[object, bool] = (None, False)  # labels, and whether all that they name lies on the CPU
        self._diverged: TrainingDiverged | None = None
        self._run_warned = False  # this run of bad steps has had its warning
        self._limits = None
        self._bad_params_warned = False
        self._spike_warned = False
        self._agreement = None
        self._recorder: Recorder | None = None  # of the model's last forwards, for find_origin=True
        self._window: Window | None = None  # of an accumulation whose micro-batches are checked
        self._window_facts: dict[str, Any] = {}  # what the report of the step that ends it says of it
        self._set_policy(policy)

    def _set_policy(self, policy: Policy) -> None:
        former, self._limits = self._limits, limits_for(policy, self._limits)
        try:
            self.excluded_from_agc()  # a name that is no parameter's is said now
        except ValueError:
            self._limits = former
            raise
        self.policy = policy
        self._norm_bound = sys.float_info.max if policy.fixed_norm is None else policy.fixed_norm - 1e-6
        if self._limits is not None:  # every norm is to be looked at
            self._norm_bound = -1.0
        self._value_bound = float("inf") if policy.clip_value is None else policy.clip_value
        if self._record.history.size != policy.history:
            self._record.history = self._record.history.resized(policy.history)
        self._replan()

    def _replan(self) -> None:
        """Note whether a healthy step needs nothing but the scan and the inner step."""
        listened = self._record.listener is not None
        alone = not self._sharded and (self._agreement is None or self._agreement.silent)
        tracing = self._recorder is not None and self._recorder.loss_trace.active
        simple = alone and not listened and not tracing and self._window is None
        here = self._deferred is False or (self._deferred is None and self._placed[1])  # no device that could decide
        self._plain = simple and here and not self.policy.check_params_every
        self._only_clips = self._limits is None and self._agreement is None  # finite gradients: no more questions

    # ---- the step ----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Scan the gradients, then step, clip and step, or not step.

        Args:
            closure: evaluates the model, calls backward and returns the loss, which joins the scan. LBFGS and
                optimizers that are not torch's may call it several times: a NaN or Inf in any evaluation restores
                weights and state to what they were (this takes a copy of both for the time of the step).
            kwargs: handed on to the inner optimizer's `step`.

        Returns:
            What the inner optimizer returned; for a skipped step the loss that the closure returned, or None.

        Raises:
            NonFiniteError: there is a NaN or Inf and `on_nonfinite` says "raise".
            TrainingDiverged: this skip is the `max_consecutive_skips`-th in a row.
        """
        if closure is not None or not self._plain or self._losses or "found_inf" in self.__dict__:
            return self._other_step(closure, kwargs)
        # The hot path, all in one place: no Python loop over the parameters, no report until somebody asks for it.
        inner, names = self.optimizer, self._names
        try:
            scan = engine.scan_grads(inner.param_groups)
        except BadInput as error:
            raise self._explained(error) from None
        if scan.signature != names.signature or not names.signature:
            names.labels(scan.signature, inner.param_groups)
            if self.notice_shards() or self._notice_places():
                return self._other_step(closure, kwargs)
        labels, factor = names.latest, 1.0
        if not 0.0 < scan.norm <= self._norm_bound or scan.inf_norm > self._value_bound:  # NaN is not within bounds
            self._step_losses = self._reported_losses = []  # those of an earlier step
            if not (self._only_clips and self.scaled_step is None and 0.0 < scan.norm < math.inf):
                return self._judge(scan, labels if scan.finite else names.renewed(inner.param_groups), kwargs)
            factor = self.scale_and_clip(scan)
        result = self.inner_step(kwargs) if factor != 1.0 else inner.step(**kwargs) if kwargs else inner.step()
        self._last = healthy = Healthy(scan, labels, self._steps, time.time(), factor)
        self._steps += 1
        self._run_warned = False
        self._record.add_healthy(healthy, len(labels))
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch must not wrap it: the inner step runs the hooks

    def _other_step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """A step with a closure, a gradient scaler, or parameters that may be on a CUDA device."""
        self._settle()
        if self._recorder is not None:
            self._recorder.loss_trace.end()
            self._replan()
        if self._diverged is not None:
            diverged, self._diverged = self._diverged, None
            raise diverged
        if closure is not None:
            if "found_inf" in self.__dict__:
                raise RuntimeError("a closure can't be used with a GradScaler: call scaler.step(optimizer) without one")
            return step_with_closure(self, closure, kwargs)
        scale, found_inf = handed_over(self)
        try:
            if only_makes_state(self.optimizer):
                return self.inner_step(kwargs)
            if self._can_defer():
                return self._launch(kwargs, scale, found_inf)
            flagged = found_inf is not None and not float(found_inf) <= 0
            factor = 1.0 if scale is None else float(scale)
            if not 0.0 < factor < math.inf:  # a loss scale that went to 0 or inf: nothing can be unscaled
                factor, flagged = 1.0, True
            result = self.host_step(kwargs, factor, flagged)
            self._notice_places()
            return result
        except BaseException:  # GradScaler deletes these only after a step that returned
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise

    def host_step(self, kwargs: dict[str, Any], scale: float = 1.0, flagged: bool = False) -> Any:
        """One step decided on the host; gradients are `scale` times too large, `flagged`: the scaler found an Inf."""
        if self._window is not None:
            return self.window_step(kwargs, scale, flagged)
        scan, labels = self.scan()
        return self._judge(scan, labels, kwargs, scale, flagged)

    def window_step(self, kwargs: dict[str, Any], scale: float, flagged: bool) -> Any:
        """The step that ends an accumulation whose micro-batches were checked."""
        raise NotImplementedError

    def _end_window(self) -> Window | None:
        window, self._window = self._window, None
        self._replan()
        return window

    def _judge(
        self,
        scan: EngineScan,
        labels: Sequence[Label],
        kwargs: dict[str, Any],
        scale: float = 1.0,
        flagged: bool = False,
    ) -> Any:
        """From the scan to the end of the step."""
        if scan.norm == 0.0 and only_makes_state(self.optimizer):
            return self.inner_step(kwargs)
        if scale != 1.0:
            scan = Unscaled(scan, scale, self._params())
        if self._agreement is not None:
            scan, labels, flagged = self.agreed(scan, labels, flagged)
        if self.scaled_step is not None:
            self.scaled_step.answer(scan, flagged)
        if flagged or not scan.finite:
            return self._bad_step(scan, labels, scale, kwargs)
        if self.look_for_spike(scan) is not None and self.policy.on_spike == "skip":
            return self.refuse_spike(scan, labels, scale)
        factor = 1.0
        if scan.norm > self._norm_bound or scan.inf_norm > self._value_bound or scale != 1.0:
            factor = self.scale_and_clip(scan, scale)
        result = self.inner_step(kwargs)
        known = {"loss_scale": scale, **self.notes_on_limits()}
        report = self.report(scan, labels, clip_factor=factor, skipped=False, action="step", **known)
        self.finish(report, scan)
        return result

    def _bad_step(self, scan: EngineScan, labels: Sequence[Label], scale: float, kwargs: dict[str, Any]) -> Any:
        report = self.report(scan, labels, action="undecided", skipped=False, clip_factor=1.0, loss_scale=scale)
        try:
            if self.scaled_step is not None:
                self.scaled_step.explain(report)
            elif (handed := self.__dict__.get("grad_scale")) is not None and (dead := dead_scale(float(handed))):
                vars(report).update(loss_scale=float(handed), scale_note=dead)
            self.look_for_origin(report)
            action = self.decide(report)
            if action not in ("skip", "raise"):
                factor = self.repair(scan, scale, action)
                result = self.inner_step(kwargs)
        except BaseException:
            self._steps = report.step  # it was no step
            raise
        if action in ("skip", "raise"):
            return self.refuse(report, action, scan, scale)
        vars(report).update(action=action, clip_factor=factor, **self.notes_on_limits())
        self.finish(report, scan)
        return result

    def observe(self, loss: Tensor | float) -> None:
        """Let the loss join the next scan."""
        if self._recorder is not None and isinstance(loss, Tensor):
            self._recorder.observe(loss)
        note_alone(self)
        self._losses.append(as_loss(loss))

    def start_over(self) -> None:
        """Forget the present run of bad steps: weights and state were put back to a good moment."""
        self._settle(wait=True)
        self._losses.clear()
        self._end_window()
        self._diverged = None
        self._run_warned = self._bad_params_warned = self._spike_warned = False
        self._record.start_over()
        for handed in ("grad_scale", "found_inf"):
            self.__dict__.pop(handed, None)

    # ---- the parts of a step, also used by closure.py ----------------------------------------------------------------

    def scan(self) -> tuple[EngineScan, Sequence[Label]]:
        """Scan the gradients and the losses observed since the last scan."""
        losses, self._losses = self._losses, []
        groups = self.optimizer.param_groups
        try:
            scan = self._scanned(losses)
        except Exception as error:
            if self._agreement is not None and (losses or not self._agreement.silent):
                self._agreement.give_up(self._params(), self._steps)
            raise (self._explained(error) if isinstance(error, BadInput) else error) from None
        self._step_losses = self._reported_losses = losses
        labels = self._names.labels(scan.signature, groups) if scan.finite else self._names.renewed(groups)
        return scan, Joined(labels, loss_labels(losses)) if losses else labels

    def report(self, scan: EngineScan, labels: Sequence[Label], **known: Any) -> StepReport:
        """The report of the present step, whose number it takes."""
        if self.scaled_step is not None:
            known["loss_scale"] = float(self.scaled_step.scale)
        if self._reported_losses:
            known["loss"] = mean_loss(self._reported_losses)
        report = StepReport.from_scan(scan, labels, self._places(scan), step=self._steps, time=time.time(), **known)
        if self._window_facts:
            vars(report).update(self._window_facts)
        self._steps += 1
        self._last = report
        return report

    def repair(self, scan: EngineScan, scale: float, action: Action) -> float:
        """Make the gradients ready for a step although there is a NaN or Inf; returns the clip factor."""
        self.forget_limits()
        if action == "zero":
            self._zero_nonfinite()
            return self.scale_and_clip(scan, scale)
        if scale != 1.0:
            engine.scale_grads_(self._grad_groups(), 1.0 / scale)
        return 1.0

    def refuse(self, report: StepReport, action: Action, scan: EngineScan, scale: float = 1.0, loss: Any = None) -> Any:
        """Do not step: record it, clear the gradients or raise. Returns `loss`."""
        vars(report).update(action=action, skipped=True, buffers=self._bad_buffers())
        if report.bad and not report.parameters:
            vars(report)["parameters"] = self._bad_weights()
        if action == "skip":
            self._clear_grads()
        if self._limits is not None:
            self._limits.skipped()
        self.note_skip(report, scan.count, scale)
        if action == "raise":
            raise NonFiniteError(messages.bad_step(report, scale), report) from self._record.taken_failure()
        if self._diverged is not None:
            diverged, self._diverged = self._diverged, None
            raise diverged from self._record.taken_failure()
        self._record.raise_failed()
        return loss

    def refuse_spike(self, scan: EngineScan, labels: Sequence[Label], scale: float = 1.0) -> Any:
        """Do not step because of a spike."""
        known = {"loss_scale": scale, **self.notes_on_limits()}
        report = self.report(scan, labels, action="skip", skipped=True, clip_factor=1.0, **known)
        return self.refuse(report, "skip", scan, scale)

    def look_for_origin(self, report: StepReport) -> None:
        """On the first bad step of a run, with find_origin=True: replay the forward pass and note who made it.

        On a later one too if the loss was traced meanwhile, because the replay had found nothing.
        """
        if self._recorder is None:
            return
        found = None
        try:
            if not self._run_warned or self._recorder.loss_trace.active:
                found = self._recorder.look()
        finally:
            vars(report)["origin"] = self.origin_of_all(found)
            self._replan()

    def note_skip(self, report: StepReport, rows: int, scale: float = 1.0) -> None:
        """Count, record and, once per run of skips, warn; notes in `_diverged` that the run is to be given up."""
        record = self._record
        vars(self.optimizer)["_opt_called"] = True  # else a scheduler made before `wrap` says that step() was forgotten
        record.add_skipped(report, rows)
        note_alone(self)
        offender = repeat_offender(record.offenders)
        if report.action == "skip" and record.consecutive == self.policy.max_consecutive_skips:
            self._diverged = TrainingDiverged(messages.diverged(report, record.consecutive, offender), report)
        warned, self._run_warned = self._run_warned, True
        if report.action == "skip" and not warned:
            messages.warn(messages.bad_step(report, scale, offender))

    def finish(self, report: StepReport, scan: EngineScan) -> None:
        """What follows a real step: the check of the parameters, the record, the hints."""
        every = self.policy.check_params_every
        due = every and (report.step + 1) % every == 0
        if due:
            vars(report)["parameters"] = self.bad_parameters()
        self._record.add(report, scan.count)
        if self._limits is not None:
            self._note_spike(report)
        if report.action == "step":
            self._run_warned = False
        elif not self._run_warned:
            self._run_warned = True
            messages.warn(messages.bad_step(report))
            note_alone(self)
        if not scan.numel and not scan.count and not self._hinted:
            self._hinted = True
            messages.warn(messages.no_gradients(report.step), UserWarning)
        if due:
            self._judge_parameters(report)
        self._record.raise_failed()

    def _note_spike(self, report: StepReport) -> None:
        """Let a step that was taken enter the history; if it is a spike, warn once per run of them."""
        assert self._limits is not None
        self._limits.taken()
        warned, self._spike_warned = self._spike_warned, report.spike is not None
        if report.spike is not None and not warned:
            messages.warn(messages.spike(report))

    def _judge_parameters(self, report: StepReport) -> None:
        """A weight is NaN or Inf: raise or warn, as `on_nonfinite` says as far as that is still possible."""
        if not report.parameters:
            self._bad_params_warned = False
            return
        self._record.bad_parameter_steps += 1
        text = messages.bad_parameters(report, suspects(self.optimizer, self._names))
        if self.decide(report) == "raise":
            raise NonFiniteError(text, report) from self._record.taken_failure()
        if not self._bad_params_warned:
            self._bad_params_warned = True
            messages.warn(text)

    def _explained(self, error: BadInput) -> Exception:
        labels = self._names.refresh(0, self.optimizer.param_groups)
        name = f"grad of '{labels[error.position].names[0]}'" if error.position < len(labels) else "the observed loss"
        return error.kind(f"{name} {error.reason}")
