"""The memory that the compared commands walk: one flat buffer, and gradients that are views into it.

Every command of a row then reads the same bytes, the flat reads included, so none is helped by a cache that another
has to do without. Each gradient starts on a 64-byte boundary, as an allocation of its own would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanscan.bench.shapes import Shape

__all__ = ["Gradients", "make_gradients"]

ALIGNMENT = 64  # bytes, as torch's CPU allocator gives


@dataclass(frozen=True)
class Gradients:
    """Parameters with gradients, and the flat buffer that holds all the gradients.

    ``padding`` is the number of bytes between gradients that no tensor owns; the flat reads read them too.
    """

    flat: torch.Tensor
    parameters: list[torch.nn.Parameter]
    padding: int

    @property
    def grads(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return [{"params": self.parameters}]

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


def make_gradients(
    shapes: Sequence[Shape], dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> Gradients:
    """Parameters of these shapes with small random gradients.

    Args:
        shapes: one per parameter.
        dtype, device: of parameters and gradients.
        seed: of the values (normal, deviation 1e-2), drawn once for 1 MB and repeated.

    Example:
        >>> made = make_gradients([(3,), (2, 2)])
        >>> [tuple(grad.shape) for grad in made.grads], made.padding
        ([(3,), (2, 2)], 52)
    """
    step = ALIGNMENT // dtype.itemsize
    sizes = [math.prod(shape) for shape in shapes]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // step) * step)
    end = starts[-2] + sizes[-1] if sizes else 0
    flat = fill(torch.empty(end + end % 2, dtype=dtype, device=device), seed)
    views = [flat[start : start + size].view(shape) for start, size, shape in zip(starts, sizes, shapes, strict=False)]
    return Gradients(flat, [_parameter(view) for view in views], (end - sum(sizes)) * dtype.itemsize)


def fill(buffer: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Fill a flat buffer with repeated small normal numbers; far quicker than drawing each."""
    pattern = torch.randn(2**20 // buffer.element_size(), generator=torch.Generator().manual_seed(seed)) * 1e-2
    pattern = pattern.to(device=buffer.device, dtype=buffer.dtype)
    for start in range(0, buffer.numel(), pattern.numel()):
        part = buffer[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])
    return buffer


def _parameter(view: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.full_like(view, 0.1))
    parameter.grad = view
    return parameter
