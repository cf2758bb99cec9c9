"""Copies that look for NaN and Inf on the way, with PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["copy_finite"]

_PIECE_BYTES = 1 << 20  # is copied, and then scanned while it is still in the processor's cache


@torch.no_grad()
def copy_finite(sources: Sequence[Tensor], targets: Sequence[Tensor], scan: Callable[[Sequence[Tensor]], Any]) -> bool:
    """See `nanscan.engine.copy_finite`; `scan` reads tensors."""
    finite = True
    for some, others in _pieces(sources, targets):
        torch._foreach_copy_(others, some, non_blocking=True)
        floats = [source for source in some if source.is_floating_point() or source.is_complex()]
        finite &= bool(scan(floats).finite)
    return finite


def _pieces(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Tensors, or parts of large ones, to be copied together, and where to."""
    some: list[Tensor] = []
    others: list[Tensor] = []
    room = _PIECE_BYTES
    for source, target in zip(sources, targets, strict=True):
        size = source.nbytes
        if size > _PIECE_BYTES and _can_be_cut(source, target):
            step = _PIECE_BYTES // source.element_size()
            parts = torch.split(source.view(-1), step), torch.split(target.view(-1), step)
            yield from (([one], [other]) for one, other in zip(*parts, strict=True))
            continue
        if size > room and some:
            yield some, others
            some, others, room = [], [], _PIECE_BYTES
        some.append(source)
        others.append(target)
        room -= size
    if some:
        yield some, others


def _can_be_cut(source: Tensor, target: Tensor) -> bool:
    return source.device.type == "cpu" and source.is_contiguous() and target.is_contiguous()
