"""Was it the loss scale? Tells an overflow by the scale from a true NaN, and says what keeps a scale from working."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from nanscan.report import StepReport

__all__ = ["ScaleRule", "ScaleWatch", "dead_scale", "judge"]

_NO_GROWTH_INTERVALS = 4  # so many growth intervals of good steps without any growth are worth a word
_LARGEST_SCALE = 2.0**126  # near it float32 ends: a scale that has come that far need not grow
_SAME_NORMS = 5  # so many scaled norms in a row that are one number: somebody clips them
_CLIP_LIMIT = 101.0  # people clip to less, and to a number of two digits; a scaled norm is usually far larger


class ScaleRule(NamedTuple):
    """How the loss scale moves; see `nanscan.GradScaler`."""

    min_scale: float
    growth_interval: int
    backoff_factor: float
    hysteresis: int


def judge(report: StepReport, scale: float, rule: ScaleRule) -> str:
    """One sentence on what the loss scale has to do with a NaN or Inf.

    Args:
        report: of the bad step.
        scale: the loss scale in force.
        rule: how it moves.

    >>> from nanscan.report import Report, TensorReport
    >>> row = TensorReport("fc.bias", (2,), "float32", "cpu", math.inf, 0.0, 0, 1, (1,))
    >>> bad = StepReport(False, math.inf, 0.0, 0.0, 0, 1, 2, (row,), (row,))
    >>> rule = ScaleRule(min_scale=1.0, growth_interval=2000, backoff_factor=0.5, hysteresis=1)
    >>> judge(bad, 65536.0, rule)
    'Inf at loss scale 65536: the scale was too high and will be halved'
    >>> judge(bad, 1.0, rule)
    'Inf at loss scale 1, which is min_scale: the scale is not the cause, this is a true Inf'
    """
    kind = "NaN" if report.nan_count else "Inf"
    loss = [row for row in report.bad if row.kind == "loss"]
    if dead := dead_scale(scale):
        return dead
    if loss:
        which = "NaN" if loss[0].nan_count else "Inf"
        return f"the loss itself is {which}, before any scaling: the scale ({scale:.10g}) is not the cause"
    if not report.bad:
        return ""
    found = f"{kind} at loss scale {scale:.10g}"
    if scale <= rule.min_scale:
        return f"{found}, which is min_scale: the scale is not the cause, this is a true {kind}"
    if kind == "Inf":
        return f"{found}: the scale was too high and {_lowered(rule)}"
    return (
        f"{found}: the scale may have made it (Inf - Inf is NaN) and {_lowered(rule)}; what is left at "
        f"min_scale={rule.min_scale:.10g} is a true NaN"
    )


def dead_scale(scale: float) -> str:
    """One sentence on a loss scale that is 0, negative, Inf or NaN; empty for any other.

    >>> dead_scale(0.0), dead_scale(8.0)
    ('the loss scale itself is 0: no gradient can be unscaled; set it anew with scaler.update(new_scale=65536.0)', '')
    """
    if 0 < scale < math.inf:
        return ""
    return (
        f"the loss scale itself is {scale:.10g}: no gradient can be unscaled; set it anew with "
        "scaler.update(new_scale=65536.0)"
    )


def _lowered(rule: ScaleRule) -> str:
    how = "halved" if rule.backoff_factor == 0.5 else f"multiplied by {rule.backoff_factor:g}"
    return f"will be {how}" + (f" at {rule.hysteresis} such steps in a row" if rule.hysteresis > 1 else "")


@dataclass
class ScaleWatch:
    """What a guarded optimizer's steps have shown of the scale; says each thing once."""

    scale: float = 0.0  # of the last step
    run_from: float = 0.0  # the scale at which the present run of overflows began, 0: there is none
    good: int = 0  # steps since the scale last grew
    overflows: int = 0  # episodes since then
    same: int = 0  # scaled norms in a row that are the last one
    norm: float = 0.0
    said: set[str] = field(default_factory=set)

    def note(self, report: StepReport, rule: ScaleRule, unscaled_before: bool) -> str | None:
        """Take a step into account; what is to be said about the scale now, if anything.

        Args:
            report: of the step; `loss_scale` is that in force.
            rule: how it moves.
            unscaled_before: the user had called `scaler.unscale_`.
        """
        scale = report.loss_scale
        if scale > self.scale:
            self.good = self.overflows = 0
        self.scale = scale
        if not math.isfinite(report.norm):
            return self._overflow(report, rule)
        self.run_from = 0.0
        self.good += not report.skipped
        return self._never_grows(rule) or self._clipped_scaled(report, unscaled_before)

    def _overflow(self, report: StepReport, rule: ScaleRule) -> str | None:
        if not self.run_from:
            self.run_from = self.scale
            self.overflows += 1
        fell = self.run_from > self.scale and self.scale <= rule.min_scale
        if not fell or not self._first("collapse"):
            return None
        return (
            f"nanscan: the loss scale has collapsed: it fell from {self.run_from:.10g} to min_scale="
            f"{rule.min_scale:.10g} by step {report.step}, and there still is {report.describe()}. So the scale is not "
            "the cause: look for a true NaN or Inf (a bad batch, a learning rate too high, an operation outside of "
            "float16's range; find_origin=True names the operation). (This is said once.)"
        )

    def _never_grows(self, rule: ScaleRule) -> str | None:
        steps = _NO_GROWTH_INTERVALS * rule.growth_interval
        if self.good < steps or self.overflows < _NO_GROWTH_INTERVALS or self.scale >= _LARGEST_SCALE:
            return None
        if not self._first("growth"):
            return None
        return (
            f"nanscan: the loss scale never grows: {self.good} good steps since it last did, at growth_interval="
            f"{rule.growth_interval}, because gradients overflowed on {self.overflows} occasions meanwhile; it is "
            f"{self.scale:.10g} now. Small gradients underflow in float16 where it is low. Look at what overflows "
            "(optimizer.history: reports that are skipped), give a smaller growth_interval, hysteresis=2, or train "
            "in bfloat16. (This is said once.)"
        )

    def _clipped_scaled(self, report: StepReport, unscaled_before: bool) -> str | None:
        norm = report.norm * self.scale
        alike = self.norm > 0 and abs(norm - self.norm) <= 1e-4 * self.norm
        self.same, self.norm = (self.same + 1 if alike else 1), norm
        usual = norm < _CLIP_LIMIT and math.isclose(norm, float(f"{norm:.2g}"), rel_tol=1e-4)
        if unscaled_before or self.scale < 2 * _CLIP_LIMIT or not usual or self.same < _SAME_NORMS:
            return None
        if not self._first("clipped"):
            return None
        return (
            f"nanscan: the norm of the *scaled* gradients was {norm:.4g} in each of the last {self.same} steps, so it "
            f"looks as if they were clipped to that before they were unscaled (by {self.scale:.10g}): the model hardly "
            "moves. Leave clip_grad_norm_ out and write nanscan.wrap(optimizer, clip_norm=...), or call "
            "scaler.unscale_(optimizer) before clipping. (This is said once.)"
        )

    def _first(self, subject: str) -> bool:
        new = subject not in self.said
        self.said.add(subject)
        return new
