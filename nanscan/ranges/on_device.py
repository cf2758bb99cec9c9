"""The range of a tensor on an accelerator, without waiting for it: numbers stay there until a whole step is fetched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanscan.ranges.stats import TINY, Stats, limit_of

__all__ = ["Pending", "Transfer", "launch"]


class Pending(NamedTuple):
    """Stats whose numbers are still on the device."""

    numel: int
    dtype: str
    limit: float
    numbers: Tensor

    def stats(self, numbers: Sequence[float]) -> Stats:
        """With the numbers that were fetched."""
        low, high, norm, zeros, tiny, nans, infs, positive = numbers
        return Stats(
            self.numel, low, high, norm, zeros, tiny, int(nans), int(infs), int(positive), self.dtype, self.limit
        )


@torch.no_grad()
def launch(values: Tensor) -> Pending:
    """Queue the measuring of a plain strided tensor with at least one element."""
    name, limit = limit_of(values.dtype)
    values = values.detach()
    values = values if values.dtype.itemsize > 2 else values.float()
    nan = values.isnan()
    inf = values.isinf() & ~nan
    values = values.abs() if values.is_complex() else values
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    finite = ~(nan | inf)
    safe = torch.where(finite, values, 0)
    size = safe.abs()
    below = (size < TINY) & finite
    zeros = ((size == 0) & finite).sum()
    peak = size.amax().to(wide)  # squares of numbers of any size: scaled by the largest
    scale = torch.where(peak > 0, peak, 1)
    norm = torch.linalg.vector_norm(safe / scale.to(safe.dtype), dtype=wide) * scale
    numbers = [
        torch.where(finite, values, math.inf).amin(),
        torch.where(finite, values, -math.inf).amax(),
        norm,
        zeros,
        below.sum() - zeros,
        nan.sum(),
        inf.sum(),
        (inf & (values > 0)).sum(),
    ]
    return Pending(values.numel(), name, limit, torch.stack([number.to(wide) for number in numbers]))


class Transfer:
    """The numbers of several tensors on their way to the host: one copy for each device, into pinned memory."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending
        self._parts: list[tuple[list[int], Tensor]] = []
        self._events: list[Any] = []
        by_device: dict[torch.device, list[int]] = {}
        for index, item in enumerate(pending):
            by_device.setdefault(item.numbers.device, []).append(index)
        for device, indices in by_device.items():
            self._parts.append((indices, self._copy(device, torch.stack([pending[i].numbers for i in indices]))))

    def _copy(self, device: torch.device, numbers: Tensor) -> Tensor:
        if device.type != "cuda":
            return numbers
        host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.Event("cuda")
        event.record(torch.cuda.current_stream(device))
        self._events.append(event)
        return host

    def ready(self) -> bool:
        """True once `get` would not wait."""
        return all(bool(event.query()) for event in self._events)

    def get(self) -> list[Stats]:
        """Stats for each of those given, in their order; waits for the devices."""
        for event in self._events:
            event.synchronize()
        found: dict[int, Stats] = {}
        for indices, numbers in self._parts:
            for index, values in zip(indices, numbers.tolist(), strict=True):
                found[index] = self._pending[index].stats(values)
        return [found[index] for index in range(len(self._pending))]
