"""The clipping of one step: the gradients are scaled in place, or the fused optimizer divides them itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanscan import engine
from nanscan.clipping.agc import clip_units_, excluded_positions, quotient_on_host
from nanscan.clipping.limits import Limits
from nanscan.clipping.record import Spike
from nanscan.device_steps import Limiter
from nanscan.distributed.refusals import refuse_sharded
from nanscan.engine.result import EngineScan
from nanscan.engine.tensors import flat_params
from nanscan.fused import has_step_hooks, step_with, takes_scale
from nanscan.policy import SHRINK, clip_factor
from nanscan.report import Label
from nanscan.verdict import Verdict

__all__ = ["ClipStep"]

_LARGEST_DIVISOR = 1e38  # a fused optimizer is given the divisor as a float32
_FUSED_DIVIDES_FROM = 1 << 20  # elements: a smaller step is scaled in place, in less time


class ClipStep(Verdict):
    """The part of a guarded step that clips, and the inner step, which may do the dividing."""

    _limits: Limits | None  # that follow the run; None: a fixed clip_norm or none, and spikes are not looked for
    _value_bound: float
    _divisor: float  # what the fused optimizer is to divide the gradients by in this step
    _divisor_tensor: Tensor | None
    _step_losses: Sequence[Tensor] = ()  # observed for the present step
    _excluded: tuple[list[Label], tuple[str, ...], frozenset[int]] | None = None  # names, options, positions

    def look_for_spike(self, scan: EngineScan) -> Spike | None:
        """Begin a step whose gradients are finite: the spike that it is, None if it is none or nobody asked."""
        if self._limits is None:
            return None
        return self._limits.judge(scan.norm, self._observed_loss())

    def _observed_loss(self) -> float | None:
        """The mean of the losses observed for this step, of several ranks the largest; None if there is none."""
        losses, self._step_losses = self._step_losses, ()
        if self._limits is None or self._limits.spikes is None:
            return None
        means = [float(loss.real.mean(dtype=torch.float64)) for loss in losses if loss.numel()]
        mean = sum(means) / len(means) if means else -float("inf")
        if self._agreement is not None:
            mean = self._agreement.norm(mean, self._params(), self._steps)
        return mean if mean > -float("inf") else None

    def scale_and_clip(self, scan: EngineScan, scale: float = 1.0) -> float:
        """Divide the gradients by `scale`, clamp them to `clip_value`, clip their norm; returns the clip factor."""
        groups, norm = self._grad_groups(), scan.finite_norm
        if scan.inf_norm > self._value_bound:
            engine.scale_grads_(groups, 1.0 / scale, self._value_bound)
            scale = 1.0
            norm = self._clamped_norm() if self._clips() else norm
        shrunk = 1.0
        if norm == math.inf and self._clips():  # beyond float64: the factor would be 0
            engine.scale_grads_(groups, shrunk := SHRINK)
            norm = self._clamped_norm() / scale
        units = self._clip_units(scale)
        if units is not None:
            scale, norm = 1.0, norm * units
        factor = self._factor(norm)
        if scale / factor < _LARGEST_DIVISOR and self._fused_divides(scan):
            self._divisor = scale / factor
        elif factor / scale != 1.0:
            engine.scale_grads_(groups, factor / scale)
        return shrunk * (factor if units is None else factor * units)

    def _clips(self) -> bool:
        return self.policy.clip_norm is not None or self._limits is not None

    def _factor(self, norm: float) -> float:
        """What gradients of this norm are multiplied by: the one place where the limit of a step is found."""
        if self._limits is None:
            return clip_factor(norm, self.policy.fixed_norm)
        return self._limits.factor(norm)

    def _clip_units(self, scale: float) -> float | None:
        """Unscale the gradients and clip them unit by unit; the quotient of the norms, None if that isn't the rule."""
        rule = None if self._limits is None else self._limits.unitwise
        if rule is None:
            return None
        groups = self.optimizer.param_groups
        refuse_sharded(flat_params(groups), "AdaptiveClip('agc')", "use 'zclip' or 'autoclip'")
        engine.scale_grads_(groups, 1.0 / scale)
        assert rule.ratio is not None and rule.eps is not None
        return quotient_on_host(clip_units_(groups, rule.ratio, rule.eps, self.excluded_from_agc()))

    def excluded_from_agc(self) -> frozenset[int]:
        """The positions of the parameters that are not clipped unit by unit.

        Raises:
            ValueError: a name in `exclude` is no parameter's.
        """
        rule = None if self._limits is None else self._limits.unitwise
        if rule is None or not rule.exclude:
            return frozenset()
        labels = self._names.refresh(0, self.optimizer.param_groups)
        if self._excluded is None or self._excluded[0] is not labels or self._excluded[1] != rule.exclude:
            self._excluded = (labels, rule.exclude, excluded_positions(labels, rule.exclude))
        return self._excluded[2]

    def limiter(self, device: torch.device | None) -> Limiter:
        """What finds the limit of a step that this device decides."""
        assert self._limits is not None and device is not None
        return partial(self._limits.on_device(device).divisor, self.optimizer.param_groups, self.excluded_from_agc())

    def forget_limits(self) -> None:
        """What was noted for the present step does not count: its gradients are not those of a healthy step."""
        if self._limits is not None:
            self._limits.forget()

    def notes_on_limits(self) -> dict[str, Any]:
        """What the step's report says of limits that follow the run."""
        if self._limits is None:
            return {}
        return {"clip_limit": self._limits.clip_limit, "spike": self._limits.spike}

    def _fused_divides(self, scan: EngineScan) -> bool:
        """True if the inner optimizer can divide the gradients itself.

        It writes them back as flat memory: none may be shared between parameters or within itself (expanded). No step
        hook may be there to look at them before. And few elements are scaled sooner than torch hands the divisor on.
        """
        inner = self.optimizer
        if scan.numel < _FUSED_DIVIDES_FROM or self._sharded:  # the divisor is no DTensor
            return False
        return scan.row_major and scan.count == self._params() and takes_scale(inner) and not has_step_hooks(inner)

    def inner_step(self, kwargs: dict[str, Any]) -> Any:
        """The real step."""
        divisor = self._divisor
        if divisor == 1.0:
            return self.optimizer.step(**kwargs) if kwargs else self.optimizer.step()
        self._divisor = 1.0
        if self._divisor_tensor is None:
            self._divisor_tensor = torch.empty((), dtype=torch.float32, device="cpu")
        return step_with(self.optimizer, kwargs, self._divisor_tensor.fill_(divisor), None)
