"""What a gradient scaler and a guarded optimizer tell each other in one step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from nanscan import messages
from nanscan.engine.result import EngineScan
from nanscan.report import StepReport
from nanscan.scaling.judge import ScaleRule, ScaleWatch, judge

__all__ = ["ScaledStep"]


@dataclass
class ScaledStep:
    """One call of `GradScaler.step` on a guarded optimizer.

    Attributes:
        scale: the loss scale of this step, 0-dim; also where the gradients were unscaled before.
        rule: in force.
        watch: what has been seen of the scale before, by this optimizer.
        unscaled_before: the user has called `scaler.unscale_`: the gradients are unscaled already.
        gradients: there are some.
        overflow: the guard's answer: do the gradients hold a NaN or Inf? A bool, or a 0-dim flag on their device that
            nobody has waited for. None: there are no gradients, or the step came to no verdict.
    """

    scale: Tensor
    rule: ScaleRule
    watch: ScaleWatch
    unscaled_before: bool
    gradients: bool
    overflow: bool | Tensor | None = None

    def answer(self, scan: EngineScan, flagged: bool) -> None:
        """Take the guard's verdict: only the gradients speak about the scale, not an observed loss."""
        if self.gradients:
            self.overflow = flagged or not math.isfinite(scan.norm)

    def explain(self, report: StepReport) -> None:
        """Let the report of a bad step say what the scale has to do with it."""
        vars(report)["scale_note"] = judge(report, report.loss_scale, self.rule)

    def watch_step(self, report: StepReport) -> None:
        """Take the finished step into account; warns where the scale does not do what it is for."""
        text = self.watch.note(report, self.rule, self.unscaled_before)
        if text is not None:
            messages.warn(text)
