"""Adaptive limits where the device decides: the history stays there as tensors, and no step waits for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nanscan.clipping.adaptive import AdaptiveClip
from nanscan.clipping.agc import clip_units_

__all__ = ["PROBE", "DeviceLimiter", "Note"]

PROBE = 1e-6
"""Given as `clip_norm` to a launch: its `grad_scale`, the loss scale times (norm + 1e-6) / 1e-6, tells the norm."""


class DeviceRule(Protocol):
    """A rule whose history is on the device."""

    def step(self, norm: Tensor, good: Tensor) -> Tensor: ...
    def state(self) -> dict[str, Any]: ...


class DeviceZClip:
    """`nanscan.clipping.zclip.ZClip` in tensors of one element; takes over its `state()`."""

    def __init__(self, options: Mapping[str, Any], state: Mapping[str, Any], device: torch.device) -> None:
        self.options = options
        warmup = int(options["warmup"])
        first = torch.zeros(warmup, dtype=torch.float64, device=device)
        begun = len(state["first"]) if not state["begun"] else warmup
        first[: len(state["first"])] = state["first"].to(device)
        self._first = first
        self._count = torch.tensor(begun, dtype=torch.int64, device=device)
        self._mean = torch.tensor(state["mean"], dtype=torch.float64, device=device)
        self._variance = torch.tensor(state["variance"], dtype=torch.float64, device=device)
        self._places = torch.arange(warmup, device=device)

    def step(self, norm: Tensor, good: Tensor) -> Tensor:
        """The limit of a step with this norm; it enters where `good`."""
        alpha, threshold, eps = (self.options[name] for name in ("alpha", "z_threshold", "eps"))
        begun, deviation = self._count >= len(self._first), self._variance.sqrt()
        z = (norm - self._mean) / (deviation + eps)
        within = self._mean + threshold * (deviation + eps)
        limit = torch.where(z > threshold, self._mean + threshold * threshold / z * deviation, within)
        limit = torch.where(begun, limit, torch.full_like(limit, math.inf))
        clipped = torch.minimum(norm, limit)
        mean = alpha * self._mean + (1 - alpha) * clipped
        variance = alpha * self._variance + (1 - alpha) * (clipped - mean) ** 2
        first = torch.where((self._places == self._count) & ~begun, norm, self._first)
        begins = self._count + 1 == len(self._first)
        mean = torch.where(begun, mean, torch.where(begins, first.mean(), self._mean))
        variance = torch.where(begun, variance, torch.where(begins, first.var(correction=0), self._variance))
        for kept, new in ((self._first, first), (self._mean, mean), (self._variance, variance)):
            kept.copy_(torch.where(good, new, kept))
        self._count.add_(good.to(torch.int64))
        return limit

    def state(self) -> dict[str, Any]:
        """As that of `ZClip`; waits for the device."""
        count, begun = int(self._count), int(self._count) >= len(self._first)
        first = self._first[: 0 if begun else count].cpu()
        return {"begun": begun, "mean": float(self._mean), "variance": float(self._variance), "first": first.clone()}


class DeviceAutoClip:
    """`nanscan.clipping.autoclip.AutoClip` as one tensor that grows; unused places hold Inf."""

    def __init__(self, options: Mapping[str, Any], state: Mapping[str, Any], device: torch.device) -> None:
        self.percentile = float(options["percentile"])
        self.window: int | None = options["window"]
        norms = state["norms"].to(device)
        self._most = len(norms)  # that can be in it, counted on the host
        self._count = torch.tensor(len(norms), dtype=torch.int64, device=device)
        self._norms = torch.full(
            (self.window or max(1024, 2 * len(norms)),), math.inf, dtype=torch.float64, device=device
        )
        self._norms[: len(norms)] = norms
        self._places = torch.arange(len(self._norms), device=device)

    def step(self, norm: Tensor, good: Tensor) -> Tensor:
        """The limit of a step with this norm; it enters where `good`."""
        self._grow()
        here = self._places == (self._count % len(self._norms))
        norms = torch.where(here, norm, self._norms)
        held = (self._count + 1).clamp(max=len(norms))
        ordered = norms.sort().values
        place = self.percentile / 100 * (held - 1).double()
        below = place.floor().to(torch.int64)
        low, high = ordered[below.view(1)], ordered[torch.minimum(below + 1, held - 1).view(1)]
        self._norms.copy_(torch.where(good, norms, self._norms))
        self._count.add_(good.to(torch.int64))
        limit: Tensor = (low + (high - low) * (place - below)).reshape(())
        return limit

    def _grow(self) -> None:
        self._most += 1
        if self.window is None and self._most > len(self._norms):
            self._norms = torch.cat([self._norms, torch.full_like(self._norms, math.inf)])
            self._places = torch.arange(len(self._norms), device=self._norms.device)

    def state(self) -> dict[str, Any]:
        """As that of `AutoClip`; waits for the device."""
        count, norms = int(self._count), self._norms.cpu()
        if self.window is None:
            return {"norms": norms[:count].sort().values, "ordered": False}
        held = norms[:count].clone() if count <= self.window else norms.roll(-(count % self.window))
        return {"norms": held, "ordered": True}


class Note:
    """[limit, clip factor] of a step on the way to the host."""

    def __init__(self, limit: Tensor, factor: Tensor) -> None:
        self._told = torch.stack([limit, factor]).to("cpu", non_blocking=True)
        self._event: Any = None
        if limit.is_cuda:
            self._event = torch.Event("cuda")
            self._event.record(torch.cuda.current_stream(limit.device))

    def ready(self) -> bool:
        """True once `get` would not wait."""
        return self._event is None or bool(self._event.query())

    def get(self) -> tuple[float | None, float]:
        """The limit (None: none was in force) and the factor."""
        if self._event is not None:
            self._event.synchronize()
        limit, factor = self._told.tolist()
        return (limit if limit < math.inf else None), factor


class DeviceLimiter:
    """The limits of one optimizer on one device.

    Args:
        adaptive: the options.
        state: of the rule on the host; None for agc, which has none.
        device: of all parameters.
    """

    def __init__(self, adaptive: AdaptiveClip, state: Mapping[str, Any] | None, device: torch.device) -> None:
        self.adaptive = adaptive
        self.device = device
        self._rule: DeviceRule | None = None
        if state is not None:
            kind = DeviceZClip if adaptive.rule == "zclip" else DeviceAutoClip
            self._rule = kind(adaptive.options(), state, device)

    @torch.no_grad()
    def divisor(
        self,
        groups: Sequence[dict[str, Any]],
        excluded: frozenset[int],
        probed: Tensor,
        found_inf: Tensor,
        grad_scale: Tensor | None,
    ) -> tuple[Tensor, Note]:
        """What the optimizer is to divide the gradients by, 0-dim float32, and the note about it.

        Args:
            groups: `optimizer.param_groups`; agc scales their gradients in place.
            excluded: from agc, by position.
            probed: the `grad_scale` of a launch with `clip_norm=PROBE`.
            found_inf: of that launch; where it is 1.0 nothing enters.
            grad_scale: what the gradients are to be divided by because of the loss scale; None: nothing.
        """
        incoming = torch.ones_like(probed) if grad_scale is None else grad_scale.reshape(()).to(probed)
        if self._rule is None:
            adaptive = self.adaptive
            assert adaptive.ratio is not None and adaptive.eps is not None
            quotient = clip_units_(groups, adaptive.ratio, adaptive.eps, excluded, incoming)
            none = torch.full((), math.inf, dtype=torch.float64, device=probed.device)
            return incoming, Note(none, torch.ones_like(none) if quotient is None else quotient.to(none))
        norm = (probed.double() / incoming.double() * PROBE - PROBE).clamp(min=0.0)
        limit = self._rule.step(norm, (found_inf == 0) & (norm > 0) & norm.isfinite())
        if self.adaptive.max_norm is not None:
            limit = limit.clamp(max=self.adaptive.max_norm)
        factor = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
        largest = torch.finfo(torch.float32).max
        return (incoming.double() / factor).clamp(max=largest).to(torch.float32), Note(limit, factor)

    def state(self) -> dict[str, Any] | None:
        """That of the rule, as on the host; waits for the device."""
        return None if self._rule is None else self._rule.state()
