"""Steps that the device decides: flags stay there, the host hears of each later and never waits unless asked."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from nanscan import engine
from nanscan.clipping.on_device import PROBE, Note
from nanscan.engine.apply import divide_grads_
from nanscan.engine.result import DeferredScan, EngineScan, Row
from nanscan.fused import step_with
from nanscan.losses import mean_loss
from nanscan.policy import clip_factor
from nanscan.report import Label, ScanSource, StepReport, TensorReport
from nanscan.scaling.scaled_step import ScaledStep

__all__ = ["DeviceSteps", "Limiter", "Unscaled"]

MAX_PENDING = 64
Limiter = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Note]]  # see `DeviceLimiter.divisor`


class Unscaled:
    """An engine's result as if the gradients had been divided by the loss scale; rows from `count` on are losses."""

    def __init__(self, scan: EngineScan, scale: float, losses_from: int) -> None:
        self._scan = scan
        self._scale = scale
        self._losses_from = losses_from
        self.finite = scan.finite
        self.norm = scan.norm / scale
        self.finite_norm = scan.finite_norm / scale
        self.inf_norm = scan.inf_norm / scale
        self.nan_count = scan.nan_count
        self.inf_count = scan.inf_count
        self.numel = scan.numel
        self.count = scan.count
        self.signature = scan.signature
        self.row_major = scan.row_major

    def rows(self) -> list[Row]:
        return [self._unscaled(row) for row in self._scan.rows()]

    def bad_rows(self) -> list[Row]:
        return [self._unscaled(row) for row in self._scan.bad_rows()]

    def _unscaled(self, row: Row) -> Row:
        if row.position >= self._losses_from:
            return row
        return Row(*row)._replace(finite_norm=row.finite_norm / self._scale, inf_norm=row.inf_norm / self._scale)


class DeviceSource:
    """The fields of a step report whose answer is still on the device; reading one waits for it."""

    provides: ClassVar[frozenset[str]] = ScanSource.provides | {
        "skipped",
        "clip_factor",
        "clip_limit",
        "action",
        "buffers",
        "parameters",
        "loss",
        "loss_scale",
        "scale_note",
    }

    def __init__(
        self,
        scan: DeferredScan,
        labels: Sequence[Label],
        params: int,
        max_norm: float | None,
        handed: Tensor | None,
        scaled: ScaledStep | None,
        note: Note | None = None,
    ) -> None:
        self._scan: DeferredScan | None = scan  # until its result is here: it holds memory of the device
        self._labels = labels
        self._params = params
        self._max_norm = max_norm
        self._note = note  # of limits that follow the run, likewise on its way
        self._handed = handed  # what the gradient scaler gave, on its way to the host; see `_to_host`
        self.scaled = scaled
        self._result: ScanSource | None = None
        self.settle: Callable[[], None] | None = None
        self.buffers: tuple[TensorReport, ...] = ()
        self.parameters: tuple[TensorReport, ...] = ()
        self.losses: list[Tensor] = []  # on their way to the host since before the scan
        self.scale_note = ""

    def field(self, name: str) -> Any:
        """The value of the field called `name`."""
        scan = self.resolved().scan
        if name == "skipped":
            return self._skipped(scan)
        if name == "action":
            return "skip" if self._skipped(scan) else "step"
        if name == "clip_factor" and self._note is None:
            return 1.0 if self._skipped(scan) else clip_factor(scan.norm, self._max_norm)
        if name in ("clip_factor", "clip_limit"):
            limit, factor = (None, 1.0) if self._note is None or self._skipped(scan) else self._note.get()
            return factor if name == "clip_factor" else limit
        if name == "loss_scale":
            return self.loss_scale
        if name == "loss":
            return mean_loss(self.losses)
        if name in ("buffers", "parameters", "scale_note"):
            if self.settle is not None:
                self.settle()
            return getattr(self, name)
        return self.resolved().field(name)

    def resolved(self) -> ScanSource:
        """The result on the host; waits for it the first time."""
        if self._scan is not None:
            scan: EngineScan = self._scan.result()
            if self.scale != 1.0:
                scan = Unscaled(scan, self.scale, self._params)
            self._result, self._scan = ScanSource(scan, self._labels), None
        assert self._result is not None
        return self._result

    def ready(self) -> bool:
        """True once nothing here would wait."""
        return (self._scan is None or self._scan.ready()) and (self._note is None or self._note.ready())

    @property
    def scale(self) -> float:
        """The loss scale that the gradients were multiplied by; to be read when the result is there."""
        return 1.0 if self._handed is None or self._dead else float(self._handed[0])

    @property
    def loss_scale(self) -> float:
        """What the loss was multiplied by, as far as the gradient scaler has told; to be read as `scale`."""
        return 1.0 if self._handed is None else float(self._handed[2])

    @property
    def _dead(self) -> bool:
        """True if the loss scale went to 0, Inf or NaN: nothing can be unscaled."""
        return self._handed is not None and not 0.0 < float(self._handed[0]) < math.inf

    def _skipped(self, scan: EngineScan) -> bool:
        flagged = self._handed is not None and not float(self._handed[1]) <= 0
        return not scan.finite or flagged or self._dead


class DeviceSteps:
    """Launches steps and keeps those whose answer is not on the host yet, in order."""

    def __init__(self) -> None:
        self._pending: deque[tuple[StepReport, DeviceSource]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def launch(
        self,
        optimizer: torch.optim.Optimizer,
        kwargs: dict[str, Any],
        make: Callable[[DeviceSource], StepReport],
        labels: Sequence[Label],
        losses: Sequence[Tensor],
        limit: float | Limiter | None,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        scaled: ScaledStep | None = None,
    ) -> Any:
        """Scan, step and clear on the device, without waiting for it; returns what `optimizer.step` returned."""
        max_norm = PROBE if callable(limit) else limit
        groups = optimizer.param_groups
        handed = _to_host(grad_scale, found_inf, grad_scale if scaled is None else scaled.scale)
        scan = engine.launch_grads(groups, clip_norm=max_norm, extra=losses, grad_scale=grad_scale, found_inf=found_inf)
        if scaled is not None and scaled.gradients:
            scaled.overflow = scan.overflow if losses else scan.found_inf
        divisor, note = scan.grad_scale, None
        if callable(limit):
            divisor, note = limit(divisor, scan.found_inf, grad_scale)
        divides = max_norm is not None or grad_scale is not None
        if divides and not scan.separate:  # the optimizer would divide a shared gradient once for each parameter
            divide_grads_(groups, divisor)
            divides = False
        result = step_with(optimizer, kwargs, divisor if divides else None, scan.found_inf)
        engine.clear_grads_if(groups, scan.found_inf)
        params = sum(len(group["params"]) for group in groups)
        source = DeviceSource(scan, labels, params, max_norm, handed, scaled, note)
        self._pending.append((make(source), source))
        return result

    def settled(self, wait: bool) -> Iterator[tuple[StepReport, DeviceSource]]:
        """The oldest steps whose answer has arrived; with `wait`, all of them."""
        if self._pending and not wait and _capturing():  # asking for an event would break the graph
            return
        while self._pending and (wait or len(self._pending) > MAX_PENDING or self._pending[0][1].ready()):
            report, source = self._pending.popleft()
            source.settle = None
            yield report, source


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _to_host(grad_scale: Tensor | None, found_inf: Tensor | None, loss_scale: Tensor | None) -> Tensor | None:
    """[scale of the gradients, found_inf, loss scale], copied without waiting; None if nobody handed them over."""
    given = next((t for t in (grad_scale, found_inf, loss_scale) if t is not None), None)
    if given is None:
        return None
    one, zero = torch.ones_like(given, dtype=torch.float32), torch.zeros_like(given, dtype=torch.float32)
    values = [one if grad_scale is None else grad_scale, zero if found_inf is None else found_inf]
    values.append(one if loss_scale is None else loss_scale)
    return torch.stack([v.to(one, non_blocking=True).reshape(()) for v in values]).to("cpu", non_blocking=True)
