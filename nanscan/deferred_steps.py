"""Steps that the device decides: when a guarded step can be queued without waiting, how, and how its answer arrives."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanscan.checks import bad_buffers, bad_parameters
from nanscan.clipping.clip_step import ClipStep
from nanscan.device_steps import DeviceSource, DeviceSteps, Limiter
from nanscan.engine.result import EngineScan
from nanscan.fused import has_step_hooks, one_device, ready_to_skip, takes_scale
from nanscan.history import Healthy, Record
from nanscan.losses import loss_labels, told_losses
from nanscan.names import Joined
from nanscan.report import StepReport
from nanscan.scaling.judge import dead_scale
from nanscan.scaling.scaled_step import ScaledStep

if TYPE_CHECKING:
    from nanscan.microbatch_window import Window
    from nanscan.origin.recorder import Recorder

__all__ = ["DeferredSteps"]


class DeferredSteps(ClipStep):
    """The part of a guarded optimizer that leaves the decision on a step to the device."""

    scaled_step: ScaledStep | None
    _last: StepReport | Healthy | None
    _losses: list[Tensor]
    _device_steps: DeviceSteps
    _deferred: bool | None  # None: where it can
    _defer_plan: tuple[object, bool]
    _placed: tuple[object, bool]  # labels, and whether all that they name lies on the CPU
    _recorder: Recorder | None
    _window: Window | None
    _record: Record

    def note_skip(self, report: StepReport, rows: int, scale: float = 1.0) -> None:
        """Count and record a skipped step."""
        raise NotImplementedError

    def finish(self, report: StepReport, scan: EngineScan) -> None:
        """What follows a real step."""
        raise NotImplementedError

    def _notice_places(self) -> bool:
        """Look again, after a change, where parameters and gradients lie; True if a device may have to decide now."""
        labels = self._names.latest
        if self._deferred is None and self._placed[0] is not labels and not len(self._device_steps):
            self._placed = (labels, bool(labels) and all(label.device == "cpu" for label in labels))
            self._replan()
        return self._deferred is None and not self._placed[1]

    def _can_defer(self) -> bool:
        """True if flags on the device can do it: a fused optimizer on one CUDA device, "skip", nobody to call."""
        policy, inner = self.policy, self.optimizer
        if self._recorder is not None or self._sharded:  # the host replays, or puts the shards together
            return False
        if self._agreement is not None and (self._losses or not self._agreement.silent):  # it shares
            return False
        if self._limits is not None and not self._limits.can_defer():
            return False
        if self._window is not None:  # what was dropped of it is known on the host
            return False
        if self._deferred is False or policy.on_nonfinite != "skip" or policy.clip_value is not None:
            return False
        labels = self._names.refresh(0, inner.param_groups)
        if self._defer_plan[0] is not labels:
            if self.notice_shards():
                return False
            device, labels = one_device(inner.param_groups), self._names.renewed(inner.param_groups)
            self._defer_plan = (labels, device is not None and (device.type == "cuda" or self._deferred is True))
        return self._defer_plan[1] and takes_scale(inner) and not has_step_hooks(inner) and ready_to_skip(inner)

    def _launch(self, kwargs: dict[str, Any], grad_scale: Tensor | None, found_inf: Any) -> Any:
        labels = self._names.latest
        losses, self._losses = self._losses, []
        device = one_device(self.optimizer.param_groups)
        told = told_losses(losses)
        losses = [loss.to(device, non_blocking=True) for loss in losses]

        def make(source: DeviceSource) -> StepReport:
            source.settle, source.losses = lambda: self._settle(wait=True), told
            report = self._last = StepReport.from_source(source, step=self._steps, time=time.time())
            self._steps += 1
            return report

        flag = found_inf if isinstance(found_inf, Tensor) else None
        every = Joined(labels, loss_labels(losses)) if losses else labels
        norm: float | Limiter | None = self.policy.fixed_norm if self._limits is None else self.limiter(device)
        return self._device_steps.launch(
            self.optimizer, kwargs, make, every, losses, norm, grad_scale, flag, self.scaled_step
        )

    def _settle(self, wait: bool = False) -> None:
        """Record the device's steps whose answer has arrived; with `wait`, all of them."""
        for report, source in self._device_steps.settled(wait):
            try:
                self._settle_one(report, source)
            finally:
                if source.scaled is not None:
                    source.scaled.watch_step(report)
            self._record.raise_failed()

    def _settle_one(self, report: StepReport, source: DeviceSource) -> None:
        scan = source.resolved().scan
        if not report.skipped:
            self.finish(report, scan)
            return
        vars(report)["buffers"] = source.buffers = bad_buffers(self._names.model)
        if report.bad:
            vars(report)["parameters"] = source.parameters = bad_parameters(self.optimizer, self._names)
        if source.scaled is not None:
            source.scaled.explain(report)
            source.scale_note = report.scale_note
        elif dead := dead_scale(source.loss_scale):
            vars(report)["scale_note"] = source.scale_note = dead
        self.note_skip(report, scan.count, source.scale)
