"""ZClip: norms far above their exponential mean are pulled back (Kumar et al. 2025, arXiv:2504.02507)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from nanscan.clipping.checked_state import history_of, number_of

__all__ = ["ZClip"]


class ZClip:
    """The exponential mean and variance of a run's norms.

    The first `warmup` norms give both their start. A norm g above the threshold is clipped to
    ``mean + z_threshold**2 / z * deviation`` with ``z = (g - mean) / (deviation + eps)``; the clipped norm enters:
    ``mean = alpha * mean + (1 - alpha) * g``, then ``variance = alpha * variance + (1 - alpha) * (g - mean)**2``.

    >>> rule = ZClip(0.97, 2.5, 2, 1e-6)
    >>> for norm in (1.0, 3.0):
    ...     rule.enter(norm)
    >>> rule.limit(12.0) < rule.limit(7.0) < rule.limit(2.0)  # the higher it is, the more is taken away
    True
    """

    name = "zclip"

    def __init__(self, alpha: float, z_threshold: float, warmup: int, eps: float) -> None:
        self.alpha = alpha
        self.z_threshold = z_threshold
        self.warmup = warmup
        self.eps = eps
        self._first: list[float] = []
        self._mean = self._variance = 0.0
        self._begun = False  # the warm-up is over

    def limit(self, norm: float) -> float:
        """The limit of a step with this norm; for one that is no spike, the norm from which on it would be one."""
        if not self._begun:
            return math.inf
        deviation = math.sqrt(self._variance)
        z = (norm - self._mean) / (deviation + self.eps) if deviation + self.eps else math.inf * (norm > self._mean)
        if not z > self.z_threshold:
            return self._mean + self.z_threshold * (deviation + self.eps)
        return self._mean + self.z_threshold * self.z_threshold / z * deviation

    def enter(self, norm: float) -> None:
        """The step with this norm was taken."""
        if not self._begun:
            self._first.append(norm)
            if len(self._first) >= self.warmup:
                self._begin()
            return
        norm = min(norm, self.limit(norm))
        self._mean = self.alpha * self._mean + (1 - self.alpha) * norm
        self._variance = self.alpha * self._variance + (1 - self.alpha) * (norm - self._mean) ** 2

    def _begin(self) -> None:
        first, self._first, self._begun = self._first, [], True
        self._mean = math.fsum(first) / len(first)
        self._variance = math.fsum((norm - self._mean) ** 2 for norm in first) / len(first)

    def state(self) -> dict[str, Any]:
        """Mean and variance, and the norms collected in the warm-up."""
        first = torch.tensor(self._first, dtype=torch.float64, device="cpu")
        return {"begun": self._begun, "mean": self._mean, "variance": self._variance, "first": first}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`.

        Raises:
            ValueError: if it is no such state.
        """
        first, mean, variance = history_of(state, "first"), number_of(state, "mean"), number_of(state, "variance")
        if not isinstance(state.get("begun"), bool) or variance < 0:
            raise ValueError(f"begun must be a bool and variance not negative, got {state.get('begun')!r}, {variance}")
        self._begun, self._first, self._mean, self._variance = state["begun"], first, mean, variance
        if not self._begun and len(first) >= self.warmup:
            self._begin()
