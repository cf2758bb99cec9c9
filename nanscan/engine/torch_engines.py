"""The eager and the reference engine as `nanscan.engine.Engine` objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanscan.engine import apply, copying, deferred, eager, reference


def _serves_none(*_: Any) -> None:
    return None


class EagerEngine:
    """Plain PyTorch operators: any device, no compiler."""

    name = "eager"
    scan = staticmethod(eager.scan)
    scan_grads = staticmethod(eager.scan_grads)
    scale_grads_ = staticmethod(apply.scale_grads_)
    zero_nonfinite_grads_ = staticmethod(apply.zero_nonfinite_grads_)
    clear_grads_if = staticmethod(apply.clear_grads_if)
    launch_grads = staticmethod(deferred.launch_grads)
    batch_check = None
    measure_ranges = staticmethod(_serves_none)
    range_meter = staticmethod(_serves_none)
    layouts_of = staticmethod(_serves_none)
    rebuild = staticmethod(_serves_none)
    plan_copies = staticmethod(_serves_none)
    copy_planned = staticmethod(_serves_none)

    @torch.no_grad()
    def copy_(self, sources: list[Tensor], targets: list[Tensor], plain: bool = False) -> None:
        """See `nanscan.engine.copy_`."""
        if sources:  # it refuses empty lists
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def copy_finite(self, sources: list[Tensor], targets: list[Tensor], plain: bool = False) -> bool:
        """See `nanscan.engine.copy_finite`."""
        return copying.copy_finite(sources, targets, self.scan)


class ReferenceEngine(EagerEngine):
    """The meaning of every number, in float64 and slow: for tests and documentation."""

    name = "reference"
    scan = staticmethod(reference.scan)
    scan_grads = staticmethod(reference.scan_grads)
