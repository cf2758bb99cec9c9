"""`on_nonfinite="zero"` where several ranks hold the same elements: what is bad on one becomes 0 on all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanscan.engine.shards import is_dtensor, local_of
from nanscan.engine.tensors import may_overlap

__all__ = ["zero_shared"]

Masks = dict[Hashable, bytes]


@torch.no_grad()
def zero_shared(shared: Mapping[Hashable, Tensor], gather: Callable[[Masks], list[Any]]) -> None:
    """Exchange which elements are NaN or Inf, and set them to 0.

    Args:
        shared: what identifies the elements that a parameter holds here, for those that other ranks hold too.
        gather: hands this rank's masks (one bit for each element) to the others and returns everybody's, by rank.
    """
    own = {part: mask for part, param in shared.items() if (mask := _mask(param)) is not None}
    bad: dict[Hashable, Any] = {}
    for masks in gather(own):
        for part, bits in masks.items():
            these = np.frombuffer(bits, dtype=np.uint8)
            bad[part] = these | bad[part] if part in bad else these
    for part, bits in bad.items():
        if part in shared:
            _zero(shared[part], bits)


def _mask(param: Tensor) -> bytes | None:
    """One bit for each element of the dense gradient; None if all are finite."""
    grad = _local(param)
    if grad is None or grad.layout is not torch.strided:
        return None
    mask = ~torch.isfinite(grad)
    return np.packbits(mask.cpu().numpy()).tobytes() if bool(mask.any()) else None


def _zero(param: Tensor, bits: Any) -> None:
    grad = _local(param)
    if grad is None or grad.layout is not torch.strided:
        return
    mask = torch.from_numpy(np.unpackbits(bits, count=grad.numel()).astype(bool)).reshape(grad.shape).to(grad.device)
    if may_overlap(grad) and not is_dtensor(param):
        param.grad = grad.masked_fill(mask, 0.0)
    else:
        grad.masked_fill_(mask, 0.0)


def _local(param: Any) -> Tensor | None:
    grad = param.grad
    return local_of(grad) if is_dtensor(grad) else grad
