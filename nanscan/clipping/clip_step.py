"""The clipping of one step: the gradients are scaled in place, or the fused optimizer divides them itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanscan import engine
from nanscan.engine.result import EngineScan
from nanscan.fused import has_step_hooks, step_with, takes_scale
from nanscan.policy import clip_factor
from nanscan.verdict import Verdict

__all__ = ["ClipStep"]

_LARGEST_DIVISOR = 1e38  # a fused optimizer is given the divisor as a float32
_FUSED_DIVIDES_FROM = 1 << 20  # elements: a smaller step is scaled in place, in less time


class ClipStep(Verdict):
    """The part of a guarded step that clips, and the inner step, which may do the dividing."""

    _value_bound: float
    _divisor: float  # what the fused optimizer is to divide the gradients by in this step
    _divisor_tensor: Tensor | None

    def scale_and_clip(self, scan: EngineScan, scale: float = 1.0) -> float:
        """Divide the gradients by `scale`, clamp them to `clip_value`, clip their norm; returns the clip factor."""
        groups, norm = self.optimizer.param_groups, scan.finite_norm
        if scan.inf_norm > self._value_bound:
            engine.scale_grads_(groups, 1.0 / scale, self._value_bound)
            scale = 1.0
            norm = self._clamped_norm() if self.policy.clip_norm is not None else norm
        factor = clip_factor(norm, self.policy.clip_norm)
        if scale / factor < _LARGEST_DIVISOR and self._fused_divides(scan):
            self._divisor = scale / factor
        elif factor / scale != 1.0:
            engine.scale_grads_(groups, factor / scale)
        return factor

    def _fused_divides(self, scan: EngineScan) -> bool:
        """True if the inner optimizer can divide the gradients itself.

        It writes them back as flat memory: none may be shared between parameters or within itself (expanded). No step
        hook may be there to look at them before. And few elements are scaled sooner than torch hands the divisor on.
        """
        inner = self.optimizer
        if scan.numel < _FUSED_DIVIDES_FROM:
            return False
        return scan.row_major and scan.count == self._params() and takes_scale(inner) and not has_step_hooks(inner)

    def inner_step(self, kwargs: dict[str, Any]) -> Any:
        """The real step."""
        divisor = self._divisor
        if divisor == 1.0:
            return self.optimizer.step(**kwargs) if kwargs else self.optimizer.step()
        self._divisor = 1.0
        if self._divisor_tensor is None:
            self._divisor_tensor = torch.empty((), dtype=torch.float32)
        return step_with(self.optimizer, kwargs, self._divisor_tensor.fill_(divisor), None)
