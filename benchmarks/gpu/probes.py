"""Gradient lists that a kernel gets wrong first, and what a scan of them must say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = (0, 1, 7, 31, 33, 255, 4097, 65_535, 65_537, 262_147, 1_000_003)


@dataclass(frozen=True)
class Probe:
    """Tensors on the card, with where a NaN and an Inf were put: (tensor, element), or None."""

    name: str
    tensors: list[torch.Tensor]
    nan_at: tuple[int, int] | None = None
    inf_at: tuple[int, int] | None = None

    def wrong(self, result: object) -> str:
        """What is wrong with an engine's answer; empty if nothing is."""
        counts = (int(self.nan_at is not None), int(self.inf_at is not None))
        if (result.nan_count, result.inf_count) != counts:
            return f"{result.nan_count} NaN and {result.inf_count} Inf found, {counts[0]} and {counts[1]} are there"
        found = {row.position: row.first_bad for row in result.bad_rows()}
        expected = dict(place for place in (self.inf_at, self.nan_at) if place is not None)
        if found != expected:
            return f"bad rows {found}, expected {expected}"
        norm = self.finite_norm()
        if not math.isclose(result.finite_norm, norm, rel_tol=1e-6, abs_tol=1e-30):
            return f"finite_norm {result.finite_norm!r}, float64 says {norm!r}"
        return ""

    def finite_norm(self) -> float:
        """By float64 on the host."""
        total = 0.0
        for tensor in self.tensors:
            values = tensor.detach().cpu().double()
            total += float((values[torch.isfinite(values)] ** 2).sum())
        return math.sqrt(total)


def probes(device: str, dtypes: tuple[torch.dtype, ...] = DTYPES, small: bool = False) -> Iterator[Probe]:
    """Odd sizes, misaligned views, more tensors than one launch takes, planted values; ``small`` for slow checkers."""
    sizes = SIZES[:7] if small else SIZES
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        tensors = [_values(size, dtype, device) for size in sizes]
        yield Probe(f"{kind}, odd sizes", tensors)
        yield Probe(f"{kind}, misaligned", [_values(size + 1, dtype, device)[1:] for size in sizes])
        last, middle = len(sizes) - 1, len(sizes) // 2
        planted = [tensor.clone() for tensor in tensors]
        planted[last][-1], planted[middle][0] = math.nan, math.inf
        yield Probe(f"{kind}, NaN in the last element", planted, (last, sizes[last] - 1), (middle, 0))
        many = [_values(64, dtype, device) for _ in range(300 if small else 5000)]
        many[-1][63] = math.nan
        yield Probe(f"{kind}, many tensors", many, nan_at=(len(many) - 1, 63))


def _values(size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator, dtype=torch.float32).to(device=device, dtype=dtype)
