"""The compiled engine as Python sees it: the fast path, and the PyTorch operators for what it does not serve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nanscan.engine import apply, eager
from nanscan.engine.result import EngineScan, Row
from nanscan.engine.tensors import resolve_at


class NativeEngine:
    """The functions of `nanscan.engine` on top of the module ``nanscan._C``.

    Tensors that the module cannot read (another device than CPU and CUDA, complex32 …) send the whole call to the
    eager engine, so that one call has one answer.
    """

    name = "native"

    def __init__(self, module: ModuleType) -> None:
        self._c: Any = module
        module.set_row_type(Row)
        for kind in (Tensor, torch.nn.Parameter):
            module.register_tensor_type(kind, torch.strided)

    def scan(self, tensors: Sequence[Tensor | None], extra: Sequence[Tensor] = ()) -> EngineScan:
        """See `nanscan.engine.scan`."""
        try:
            answer: EngineScan = self._c.scan(tensors, extra, resolve_at)
        except self._c.Unserved:
            return eager.scan(tensors, extra)
        return answer

    def scan_grads(self, param_groups: Sequence[dict[str, Any]], extra: Sequence[Tensor] = ()) -> EngineScan:
        """See `nanscan.engine.scan_grads`."""
        try:
            answer: EngineScan = self._c.scan_gradients(param_groups, extra, resolve_at)
        except self._c.Unserved:
            return eager.scan_grads(param_groups, extra)
        return answer

    def scale_grads_(
        self, param_groups: Sequence[dict[str, Any]], factor: float, clip_value: float | None = None
    ) -> None:
        """See `nanscan.engine.scale_grads_`."""
        limit = math.inf if clip_value is None else clip_value
        try:
            done: bool = self._c.scale_gradients(param_groups, factor, limit, resolve_at)
        except self._c.Unserved:
            done = False
        if not done:
            apply.scale_grads_(param_groups, factor, clip_value)

    zero_nonfinite_grads_ = staticmethod(apply.zero_nonfinite_grads_)
    clear_grads_if = staticmethod(apply.clear_grads_if)
    launch_grads = staticmethod(eager.launch_grads)
