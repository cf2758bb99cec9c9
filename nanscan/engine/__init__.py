"""How numbers are made: one interface, three engines (native, eager, reference), chosen on first use.

No other package of nanscan knows which engine runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nanscan.config import load_config
from nanscan.engine.result import BadInput, DeferredScan, EngineScan, Row, Scan

__all__ = [
    "BadInput",
    "DeferredScan",
    "EngineScan",
    "Row",
    "Scan",
    "active_engine",
    "clear_grads_if",
    "copy_",
    "copy_finite",
    "copy_planned",
    "launch_grads",
    "layouts_of",
    "measure_ranges",
    "plan_copies",
    "range_meter",
    "rebuild",
    "scale_grads_",
    "scan",
    "scan_grads",
    "zero_nonfinite_grads_",
]

if TYPE_CHECKING:  # not at run time: tensors of another framework are read without PyTorch
    from torch import Tensor

    from nanscan.engine.meter import RangeMeter, TakeOther

ParamGroups = Sequence[dict[str, Any]]
RangeNumbers = tuple[int, float, float, float, int, int, int, int, int]
MeasureRanges = Callable[["Tensor"], "RangeNumbers | None"]
MakeBatchCheck = Callable[..., Callable[[Any], bool]]
PlanCopies = Callable[["list[Tensor]", "list[Tensor]"], "bytes | None"]
CopyPlanned = Callable[[bytes, bytes], "bool | None"]


class Engine(Protocol):
    """What each engine provides; the functions of this module say what each call means."""

    name: str

    @property
    def batch_check(self) -> MakeBatchCheck | None: ...  # None: batches are looked at step by step
    @property
    def measure_ranges(self) -> MeasureRanges: ...  # a plain function: it is called for every tensor that a model makes
    def range_meter(self, take_other: TakeOther) -> RangeMeter | None: ...
    def scan(self, tensors: Sequence[Tensor | None], extra: Sequence[Tensor] = ()) -> EngineScan: ...
    def scan_grads(self, param_groups: ParamGroups, extra: Sequence[Tensor] = ()) -> EngineScan: ...
    def scale_grads_(self, param_groups: ParamGroups, factor: float, clip_value: float | None = None) -> None: ...
    def zero_nonfinite_grads_(self, param_groups: ParamGroups) -> None: ...
    def clear_grads_if(self, param_groups: ParamGroups, flag: Tensor) -> None: ...
    def copy_(self, sources: list[Tensor], targets: list[Tensor], plain: bool = False) -> None: ...
    def copy_finite(self, sources: list[Tensor], targets: list[Tensor], plain: bool = False) -> bool: ...
    @property
    def plan_copies(self) -> PlanCopies: ...
    @property
    def copy_planned(self) -> CopyPlanned: ...
    def layouts_of(self, tensors: list[Tensor]) -> tuple[bytes, bytes, bool] | None: ...
    def rebuild(
        self, value: Any, targets: list[Tensor], scalars: tuple[type, ...], copy_other: Callable[[Any], Any]
    ) -> tuple[Any, list[Tensor]] | None: ...
    def launch_grads(
        self,
        param_groups: ParamGroups,
        *,
        clip_norm: float | None,
        extra: Sequence[Tensor] = (),
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> DeferredScan: ...


_active: Engine | None = None
_choosing = threading.Lock()


def active_engine() -> Engine:
    """The engine that runs, chosen at the first call; that call may compile.

    Raises:
        EngineError: ``NANSCAN_ENGINE`` asks for the native engine and it can't be had.
        ValueError: ``NANSCAN_ENGINE`` names no engine.
    """
    global _active
    if _active is None:
        with _choosing:
            if _active is None:
                _active = _choose(load_config().engine)
    return _active


def _choose(wanted: str) -> Engine:
    from nanscan.engine.build import load_native
    from nanscan.engine.torch_engines import EagerEngine, ReferenceEngine

    if wanted == "reference":
        return ReferenceEngine()
    module = None if wanted == "eager" else load_native()
    if module is None:
        return EagerEngine()
    from nanscan.engine.native import NativeEngine

    return NativeEngine(module)


def scan(tensors: Sequence[Tensor | None], extra: Sequence[Tensor] = ()) -> EngineScan:
    """Scan ``tensors`` (None is skipped); the same tensor given twice counts once.

    The tensors in ``extra`` (a loss, say) have rows and join the NaN/Inf counts, but not the norms and ``numel``;
    their positions continue after ``tensors``.

    Raises:
        BadInput: something is not a tensor whose elements can be read.
    """
    return active_engine().scan(tensors, extra)


def scan_grads(param_groups: ParamGroups, extra: Sequence[Tensor] = ()) -> EngineScan:
    """Scan the gradient of every parameter in an optimizer's groups; parameters without one are skipped.

    A position is the flat index over ``[p for group in param_groups for p in group["params"]]``.
    """
    return active_engine().scan_grads(param_groups, extra)


def scale_grads_(param_groups: ParamGroups, factor: float, clip_value: float | None = None) -> None:
    """Multiply every gradient by ``factor``, then clamp it to ±``clip_value``; in place, each unique gradient once.

    An overlapping (expanded) gradient is replaced by a dense copy first, a sparse one by its coalesced self.
    """
    active_engine().scale_grads_(param_groups, factor, clip_value)


def zero_nonfinite_grads_(param_groups: ParamGroups) -> None:
    """Set the NaN and Inf elements of every gradient to 0 and leave the others as they are; in place."""
    active_engine().zero_nonfinite_grads_(param_groups)


def clear_grads_if(param_groups: ParamGroups, flag: Tensor) -> None:
    """Set every gradient to 0 where the 0-dim ``flag`` is 1.0, on the device, without waiting for it."""
    active_engine().clear_grads_if(param_groups, flag)


def copy_(sources: list[Tensor], targets: list[Tensor], plain: bool = False) -> None:
    """Copy each tensor into its target, as `copy_finite` does, and look at nothing."""
    active_engine().copy_(sources, targets, plain)


def copy_finite(sources: list[Tensor], targets: list[Tensor], plain: bool = False) -> bool:
    """Copy each tensor into its target; True if no floating or complex element among them is NaN or Inf.

    On the CPU everything is read once. Copies between devices are queued, not waited for.

    Args:
        sources: tensors of any dtype and layout.
        targets: for each source a tensor of its shape and dtype, in memory of its own.
        plain: the caller knows that no source is conjugated or negated lazily; asking each of thousands takes a while.
    """
    return active_engine().copy_finite(sources, targets, plain)


def plan_copies(sources: list[Tensor], targets: list[Tensor]) -> bytes | None:
    """The copies of `copy_finite`, to be made again by `copy_planned`; None if they can't be made by addresses alone.

    Args:
        sources: none of them conjugated or negated lazily.
        targets: they must keep their memory as long as the plan is used.
    """
    return active_engine().plan_copies(sources, targets)


def copy_planned(plan: bytes, addresses: bytes) -> bool | None:
    """Make planned copies again; True if all is finite, None if nothing could be copied.

    Args:
        plan: from `plan_copies`.
        addresses: where each source lies now (int64 each), in the layout that it had then; its memory must live.
    """
    return active_engine().copy_planned(plan, addresses)


def layouts_of(tensors: list[Tensor]) -> tuple[bytes, bytes, bool] | None:
    """Where tensors lie, and how: their addresses (int64 each); all else that a copy depends on; whether one is lazy.

    Equal bytes mean equal devices, dtypes, shapes, strides and laziness: a tensor that is conjugated or negated lazily
    is not what its memory says. None if an engine can't tell for all of them.
    """
    return active_engine().layouts_of(tensors)


def rebuild(
    value: Any, targets: list[Tensor], scalars: tuple[type, ...], copy_other: Callable[[Any], Any]
) -> tuple[Any, list[Tensor]] | None:
    """Nested state with the next of `targets` in place of each tensor, and the tensors met; None: no fast way here.

    Args:
        value: dicts, ordered dicts, lists and tuples, nested; they are rebuilt.
        targets: at least as many as there are tensors.
        scalars: types whose objects are kept.
        copy_other: what is called for everything else.

    Raises:
        LookupError: there are more tensors than targets, or a container is met twice.
    """
    return active_engine().rebuild(value, targets, scalars, copy_other)


def launch_grads(
    param_groups: ParamGroups,
    *,
    clip_norm: float | None,
    extra: Sequence[Tensor] = (),
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> DeferredScan:
    """Scan gradients that all lie on one device, without waiting for it.

    The result's ``found_inf`` (0-dim float32, exactly 0.0 or 1.0) is 1.0 if a gradient or an ``extra`` tensor holds a
    NaN or Inf, the incoming ``found_inf`` is above 0, or the incoming scale is not positive and finite. Its
    ``grad_scale`` (0-dim float32) is what a fused optimizer must divide by: the incoming scale ×
    ``max(1, (norm / incoming scale + 1e-6) / clip_norm)``.
    """
    return active_engine().launch_grads(
        param_groups, clip_norm=clip_norm, extra=extra, grad_scale=grad_scale, found_inf=found_inf
    )


def measure_ranges(tensor: Tensor) -> RangeNumbers | None:
    """What one read says of a strided CPU tensor; None: the active engine doesn't serve it.

    Args:
        tensor: without a negative bit (`Tensor.is_neg`).

    Returns:
        Number of elements; smallest, largest and 2-norm of the finite ones (smallest > largest: there is none); how
        many are 0, how many others are below 2^-14 in magnitude, NaN, Inf, +Inf.
    """
    return active_engine().measure_ranges(tensor)


def range_meter(take_other: TakeOther) -> RangeMeter | None:
    """Hooks that measure the outputs of a model's modules and their gradients; None: the active engine has none.

    Args:
        take_other: called with the step's record, the row and the gradient where a gradient is no plain tensor of the
            host, or of a dtype that the engine doesn't measure.
    """
    return active_engine().range_meter(take_other)
