"""The compiled engine as Python sees it: the fast path, and the PyTorch operators for what it does not serve."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nanscan.engine import CopyPlanned, MakeBatchCheck, MeasureRanges, PlanCopies, apply, copying, eager
from nanscan.engine.meter import RangeMeter, TakeOther
from nanscan.engine.native_cuda import CudaHooks, NativeDeferredScan
from nanscan.engine.result import DeferredScan, EngineScan, Row
from nanscan.engine.tensors import resolve_at

_TENSORS = (Tensor, torch.nn.Parameter)


class NativeEngine:
    """The functions of `nanscan.engine` on top of the module ``nanscan._C``.

    Tensors that the module cannot read (another device than CPU and CUDA, complex32 …) send the whole call to the
    eager engine, so that one call has one answer.
    """

    name = "native"

    def __init__(self, module: ModuleType) -> None:
        self._c: Any = module
        self._cuda = CudaHooks(module)
        self.plan_copies: PlanCopies = module.plan_copies
        self.copy_planned: CopyPlanned = module.copy_planned
        module.set_row_type(Row)
        for kind in _TENSORS:
            module.register_tensor_type(kind, torch.strided)
        self._learn_shortcuts()
        self.measure_ranges: MeasureRanges = module.measure_ranges
        self.batch_check: MakeBatchCheck | None = module.batch_check

    def _learn_shortcuts(self) -> None:
        """Let the module look for PyTorch's own functions behind `.grad`, in versions where they are known to be it."""
        if torch.__version__ < "2.15.dev0":  # a version, compared as one
            with torch._C._DisableFuncTorch():  # inside of torch.func.grad a parameter made there has no memory
                parameter = torch.nn.Parameter(torch.zeros(2, 3, device="cpu"))
                parameter.grad = torch.zeros(2, 3, device="cpu")
                self._c.learn_shortcuts(parameter)

    def range_meter(self, take_other: TakeOther) -> RangeMeter | None:
        """See `nanscan.engine.range_meter`."""
        meter: RangeMeter = self._c.RangeMeter(Tensor, OrderedDict, torch.is_grad_enabled, take_other)
        return meter

    def copy_finite(self, sources: list[Tensor], targets: list[Tensor], plain: bool = False) -> bool:
        """See `nanscan.engine.copy_finite`."""
        finite, left = self._copied(sources, targets, plain)
        if left:
            finite &= copying.copy_finite([sources[i] for i in left], [targets[i] for i in left], self.scan)
        return finite

    @torch.no_grad()
    def copy_(self, sources: list[Tensor], targets: list[Tensor], plain: bool = False) -> None:
        """See `nanscan.engine.copy_`."""
        _, left = self._copied(sources, targets, plain)
        if left:
            torch._foreach_copy_([targets[i] for i in left], [sources[i] for i in left], non_blocking=True)

    def _copied(self, sources: list[Tensor], targets: list[Tensor], plain: bool) -> tuple[bool, list[int]]:
        """Copy what is flat memory; returns whether that is finite, and the positions of the others."""
        flat: Sequence[Tensor | None] = sources
        if not plain and (any(map(Tensor.is_conj, sources)) or any(map(Tensor.is_neg, sources))):
            flat = [None if source.is_conj() or source.is_neg() else source for source in sources]  # not as in memory
        copied: tuple[bool, list[int]] = self._c.copy_tensors(flat, targets)
        return copied

    def layouts_of(self, tensors: list[Tensor]) -> tuple[bytes, bytes, bool] | None:
        """See `nanscan.engine.layouts_of`."""
        layouts: tuple[bytes, bytes, bool] | None = self._c.layouts_of(tensors)
        return layouts

    def rebuild(
        self, value: Any, targets: list[Tensor], scalars: tuple[type, ...], copy_other: Callable[[Any], Any]
    ) -> tuple[Any, list[Tensor]] | None:
        """See `nanscan.engine.rebuild`."""
        rebuilt: tuple[Any, list[Tensor]] = self._c.rebuild(value, targets, _TENSORS, scalars, copy_other)
        return rebuilt

    def read_list(self, param_groups: Sequence[dict[str, Any]]) -> int:
        """Read the list of gradients and nothing else, for benchmarks; returns how many different ones there are."""
        return int(self._c.gather_only(param_groups, resolve_at))

    def scan(self, tensors: Sequence[Tensor | None], extra: Sequence[Tensor] = ()) -> EngineScan:
        """See `nanscan.engine.scan`."""
        try:
            answer: EngineScan = self._cuda.wait(self._c.scan(tensors, extra, resolve_at, self._cuda))
        except self._c.Unserved:
            return eager.scan(tensors, extra)
        return answer

    def scan_grads(self, param_groups: Sequence[dict[str, Any]], extra: Sequence[Tensor] = ()) -> EngineScan:
        """See `nanscan.engine.scan_grads`."""
        try:
            queued = self._c.scan_gradients(param_groups, extra, resolve_at, self._cuda, math.inf, None, None)
            answer: EngineScan = self._cuda.wait(queued)
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

    def clear_grads_if(self, param_groups: Sequence[dict[str, Any]], flag: Tensor) -> None:
        """See `nanscan.engine.clear_grads_if`."""
        try:
            done: bool = self._c.clear_gradients_if(param_groups, flag.detach(), resolve_at)
        except self._c.Unserved:
            done = False
        if not done:
            apply.clear_grads_if(param_groups, flag)

    def launch_grads(
        self,
        param_groups: Sequence[dict[str, Any]],
        *,
        clip_norm: float | None,
        extra: Sequence[Tensor] = (),
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> DeferredScan:
        """See `nanscan.engine.launch_grads`."""
        limit = math.inf if clip_norm is None else clip_norm
        try:
            answer = self._c.scan_gradients(param_groups, extra, resolve_at, self._cuda, limit, grad_scale, found_inf)
        except self._c.Unserved:
            answer = None
        if answer is None or len(answer.outputs) != 1 or answer.device_count != 1:
            return eager.launch_grads(
                param_groups, clip_norm=clip_norm, extra=extra, grad_scale=grad_scale, found_inf=found_inf
            )
        return NativeDeferredScan(self._c, answer)
