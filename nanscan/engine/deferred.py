"""A scan of gradients that never waits for the device: flags and clip factor stay there, the rows follow later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanscan.engine.apply import writable_grads
from nanscan.engine.measure import Piece, measure_all, row_of, wide_dtype
from nanscan.engine.result import Scan, total
from nanscan.engine.tensors import Entry, flat_params, holds_its_values, unique


class EagerDeferredScan:
    """What `launch_grads` returns; ``found_inf`` and ``grad_scale`` are 0-dim float32 tensors on the device."""

    def __init__(self, entries: list[Entry], others: list[Entry], found: list[list[Piece]]) -> None:
        self._entries, self._others = entries, others
        self.separate = all(not e.also and holds_its_values(e.source) and e.values.is_contiguous() for e in entries)
        self._lengths = [len(p) for p in found]
        self._host = _Transfer([piece for each in found for piece in each])
        self._scan: Scan | None = None
        self.overflow: Tensor
        self.found_inf: Tensor
        self.grad_scale: Tensor

    def ready(self) -> bool:
        """True once `result` would not wait."""
        return self._scan is not None or self._host.ready()

    def result(self) -> Scan:
        """The rows and totals of the gradients as they were at the launch; waits for the device."""
        if self._scan is None:
            values = iter(self._host.get())
            entries = [*self._entries, *self._others]
            rows = [row_of(e, [next(values) for _ in range(n)]) for e, n in zip(entries, self._lengths, strict=True)]
            n = len(self._entries)
            self._scan = total(rows[:n], rows[n:], sum(e.values.numel() for e in self._entries))
        return self._scan


class _Transfer:
    """Pieces on their way to the host: on CUDA into pinned memory, behind an event; elsewhere fetched by `get`."""

    def __init__(self, found: list[Piece]) -> None:
        self._event: Any = None
        self._stacked: list[Tensor] = []
        if found:
            self._stacked = [torch.stack([p.floats for p in found]), torch.stack([p.counts for p in found])]
        if found and found[0].floats.device.type == "cuda":
            self._stacked = [_pinned_copy(t) for t in self._stacked]
            self._event = torch.Event("cuda")
            self._event.record(torch.cuda.current_stream(found[0].floats.device))

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def get(self) -> list[tuple[list[float], list[int]]]:
        if not self._stacked:
            return []
        if self._event is not None:
            self._event.synchronize()
        floats, counts = (t.tolist() for t in self._stacked)
        return list(zip(floats, counts, strict=True))


def _pinned_copy(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True).copy_(t, non_blocking=True)


@torch.no_grad()
def launch_grads(
    param_groups: Sequence[dict[str, Any]],
    *,
    clip_norm: float | None,
    extra: Sequence[Tensor] = (),
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> EagerDeferredScan:
    """Start a scan of the gradients; see `nanscan.engine.launch_grads`. An overlapping gradient is made dense first."""
    entries, others = writable_grads(param_groups), unique(extra, len(flat_params(param_groups)))
    found = measure_all([entry.values for entry in (*entries, *others)])
    scan = EagerDeferredScan(entries, others, found)
    device = _device([*entries, *others], grad_scale, found_inf)
    incoming = _scalar(1.0 if grad_scale is None else grad_scale, device)
    own = [piece for each in found[: len(entries)] for piece in each]
    scan.found_inf = _found_inf([piece for each in found for piece in each], found_inf, incoming, device)
    scan.overflow = _found_inf(own, None, torch.ones_like(incoming), device)
    scan.grad_scale = _grad_scale(own, incoming, clip_norm, device)
    return scan


def _device(entries: Sequence[Entry], *flags: Tensor | None) -> torch.device:
    for tensor in (*(entry.values for entry in entries), *flags):
        if tensor is not None:
            return tensor.device
    return torch.device("cpu")


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(device=device, dtype=torch.float32, non_blocking=True)
    return torch.full((), value, dtype=torch.float32, device=device)


def _found_inf(found: Sequence[Piece], incoming: Tensor | None, scale: Tensor, device: torch.device) -> Tensor:
    """Exactly 1.0 if a piece holds a NaN or Inf, ``incoming`` says so or nothing can be unscaled, else 0.0."""
    flag = ~((scale > 0) & torch.isfinite(scale))
    if found:
        flag = flag | (torch.stack([p.counts[2].to(device) for p in found]) >= 0).any()
    if incoming is not None:
        flag = flag | ~(_scalar(incoming, device) <= 0)
    return flag.to(torch.float32)


def _grad_scale(found: Sequence[Piece], incoming: Tensor, clip_norm: float | None, device: torch.device) -> Tensor:
    """``incoming * max(1, (norm / incoming + 1e-6) / clip_norm)``, as torch's fused optimizers divide by it.

    The norm is over the finite elements, so that the factor is a number even where the step will be skipped.
    """
    if clip_norm is None or not found:
        return incoming.clone()
    ratio, _, scale = torch.stack([p.floats for p in found]).unbind(1)
    largest = scale.max()
    relative = torch.linalg.vector_norm(ratio * (scale / torch.where(largest > 0, largest, torch.ones_like(largest))))
    wide = incoming.to(wide_dtype(device))
    factor = ((relative * largest / wide + 1e-6) / clip_norm).clamp(min=1.0)
    scaled: Tensor = (wide * factor).clamp(max=torch.finfo(torch.float32).max)
    return scaled.to(torch.float32)
