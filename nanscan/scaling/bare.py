"""What the scaler keeps of an optimizer that has no guard: what its gradients have shown of the scale."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from nanscan import messages
from nanscan.device_steps import Unscaled
from nanscan.engine.result import EngineScan
from nanscan.names import Names
from nanscan.report import StepReport
from nanscan.scaling.judge import ScaleRule, ScaleWatch

__all__ = ["Seen"]


@dataclass
class Seen:
    """One optimizer, with or without a guard, as the scaler knows it."""

    watch: ScaleWatch = field(default_factory=ScaleWatch)
    scan: EngineScan | None = None  # of the scaled gradients of this step, where the host made one
    names: Names = field(default_factory=lambda: Names(None))
    steps: int = 0

    def finish(self, optimizer: torch.optim.Optimizer, scale: float, rule: ScaleRule) -> None:
        """Take a step of an optimizer without a guard into account; warns where the scale does not work."""
        scan, self.scan = self.scan, None
        step, self.steps = self.steps, self.steps + 1
        if scan is None:
            return
        labels = self.names.labels(scan.signature, optimizer.param_groups)
        report = StepReport.from_scan(Unscaled(scan, scale, len(labels)), labels, step=step, loss_scale=scale)
        text = self.watch.note(report, rule, unscaled_before=False)
        if text is not None:
            messages.warn(text)
