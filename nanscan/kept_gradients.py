"""The gradients of the healthy micro-batches so far: copied, put back, and known again after a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from nanscan import engine
from nanscan.engine.tensors import may_overlap

__all__ = ["KeptGradients"]

_PLAIN = (Tensor, torch.nn.Parameter)


class KeptGradients:
    """A copy of each parameter's gradient, whose memory is used again.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> kept = KeptGradients()
    >>> weight.grad = torch.ones(2); kept.save([weight])
    >>> _ = weight.grad.fill_(float("nan")); kept.restore([weight]); weight.grad.tolist()
    [1.0, 1.0]
    """

    def __init__(self) -> None:
        self._copies: list[Tensor | None] = []  # by position of the parameter
        self._there: list[bool] = []  # whether it had a gradient
        self._ended: list[TensorWeakRef | None] = []  # the gradients that were there when the last window ended
        self._bad_versions: dict[int, int] = {}  # of those that held a NaN or Inf then

    def start(self) -> None:
        """A window begins: there is nothing accumulated to go back to."""
        self._there = []

    @torch.no_grad()
    def save(self, params: Sequence[Tensor]) -> None:
        """Copy the gradients."""
        self._there = [p.grad is not None for p in params]
        self._copies += [None] * (len(params) - len(self._copies))
        sources, targets = [], []
        for i, param in enumerate(params):
            grad, copy = param.grad, self._copies[i]
            if grad is None:
                continue
            if copy is None or not _alike(grad, copy):
                copy = self._copies[i] = _room_for(grad)
            if grad.layout is torch.strided:
                sources.append(grad.detach())
                targets.append(copy)
            else:
                self._copies[i] = grad.detach().clone()
        _copy(sources, targets)

    @torch.no_grad()
    def restore(self, params: Sequence[Tensor]) -> None:
        """Make the gradients what they were when they were saved; where nothing was saved, what they began with."""
        sources, targets = [], []
        for i, param in enumerate(params):
            grad, copy = param.grad, self._copies[i] if i < len(self._there) and self._there[i] else None
            if copy is None:
                param.grad = grad.zero_() if grad is not None and self._was_there(i, grad) else None
            elif grad is None or not _alike(grad, copy) or may_overlap(grad) or grad.is_inference():
                param.grad = copy.clone()
            else:
                sources.append(copy)
                targets.append(grad.detach())
        _copy(sources, targets)

    def end(self, params: Sequence[Tensor], bad: Sequence[int] = ()) -> None:
        """A window has ended: remember which gradients are there; those at positions `bad` hold a NaN or Inf."""
        self._ended = [None if p.grad is None else TensorWeakRef(p.grad) for p in params]
        grads = {i: params[i].grad for i in bad}
        self._bad_versions = {i: grad._version for i, grad in grads.items() if grad is not None}

    def leftover(self, params: Sequence[Tensor]) -> frozenset[int]:
        """The positions of gradients whose NaN is from before this window.

        Such a gradient was bad when the last window ended and has been written to once at most: by this window's first
        backward. Zeroing it would have been another time.
        """
        return frozenset(
            i
            for i, version in self._bad_versions.items()
            if i < len(params)
            and (grad := params[i].grad) is not None
            and self._was_there(i, grad)
            and grad._version - version <= 1
        )

    def _was_there(self, i: int, grad: Tensor) -> bool:
        known = self._ended[i] if i < len(self._ended) else None
        return known is not None and known() is grad


def _alike(grad: Tensor, copy: Tensor) -> bool:
    same = grad.layout is copy.layout is torch.strided and grad.shape == copy.shape
    return same and grad.dtype == copy.dtype and grad.device == copy.device


def _room_for(grad: Tensor) -> Tensor:
    return torch.empty_like(grad) if grad.layout is torch.strided else grad


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    plain = [type(a) in _PLAIN and type(b) in _PLAIN for a, b in zip(sources, targets, strict=True)]
    if all(plain):
        engine.copy_(sources, targets)
        return
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
