"""The limits of one guarded optimizer that follow its run: an adaptive clip and what counts as a spike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from nanscan.clipping.adaptive import AdaptiveClip
from nanscan.clipping.autoclip import AutoClip
from nanscan.clipping.on_device import DeviceLimiter
from nanscan.clipping.record import Spike
from nanscan.clipping.spikes import SpikeDetector
from nanscan.clipping.zclip import ZClip
from nanscan.policy import Policy, clip_factor

__all__ = ["Limits", "limits_for"]


class Rule(Protocol):
    """How the limit of a step follows from the norms before it."""

    name: str

    def limit(self, norm: float) -> float: ...
    def enter(self, norm: float) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


class Limits:
    """What a step is compared with, and the memory of the steps before it.

    A step asks in this order: `judge` (is it a spike?), `factor` (what are the gradients multiplied by?), then either
    `taken` or `skipped`. Nothing enters before that.

    Attributes:
        rule: of the adaptive clip; None where there is none, or it is agc, which has no memory.
        spikes: the detector; None if `on_spike` is None.
        clip_limit: the limit of the present step; None where none was in force, or it is a fixed one.
        spike: what the present step is, if it is one.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rule = _rule_for(policy.adaptive)
        self.spikes = None if policy.on_spike is None else SpikeDetector(policy.on_spike, policy.spike_sigma)
        self.clip_limit: float | None = None
        self.spike: Spike | None = None
        self._spike_limit = math.inf
        self._norm: float | None = None  # of the present step, as `judge` saw it
        self._loss: float | None = None
        self._clipped: float | None = None  # the norm that the rule saw
        self._on_device: DeviceLimiter | None = None  # holds the newest state while the device decides

    @property
    def unitwise(self) -> AdaptiveClip | None:
        """The options of agc, if that is the rule."""
        adaptive = self.policy.adaptive
        return adaptive if adaptive is not None and adaptive.rule == "agc" else None

    # ---- one step ----------------------------------------------------------------------------------------------------

    def judge(self, norm: float, loss: float | None) -> Spike | None:
        """Begin a step whose gradients are finite: is it a spike?

        Args:
            norm: of all gradients, unscaled, before anything is changed.
            loss: the mean of what was observed; None if nothing was.
        """
        self.forget()
        self._fetch()
        self._norm, self._loss = norm, loss
        if self.spikes is None:
            return None
        self.spike = self.spikes.judge(norm, loss)
        if self.spikes.action == "clip":
            self._spike_limit = self.spikes.norm.limit()
        return self.spike

    def factor(self, norm: float) -> float:
        """What gradients of this finite norm are multiplied by, <= 1; 1.0 = nothing to do. Notes `clip_limit`."""
        if self._clipped is None:  # of a step that evaluates several times, the first
            self._clipped = norm
        fixed = self.policy.fixed_norm
        limit = self._limit(norm)
        self.clip_limit = limit if limit < math.inf else None
        own = limit / norm if norm > limit else 1.0
        return own if fixed is None else min(own, clip_factor(norm, fixed))

    def _limit(self, norm: float) -> float:
        adaptive = self.policy.adaptive
        limit = self._spike_limit
        if adaptive is not None and adaptive.max_norm is not None:
            limit = min(limit, adaptive.max_norm)
        if self.rule is not None and norm > 0:
            limit = min(limit, self.rule.limit(norm))
        return limit

    def taken(self) -> None:
        """The step was taken: its norm and loss enter."""
        if self.spikes is not None and self._norm is not None:
            self.spikes.enter(self._norm, self._loss)
        if self.rule is not None and self._norm is not None and self._clipped:
            self.rule.enter(self._clipped)
        self.forget()

    def skipped(self) -> None:
        """The step was skipped: a spike enters what the next ones are compared with, all else is forgotten."""
        if self.spikes is not None and self.spike is not None and self._norm is not None:
            self.spikes.enter(self._norm, self._loss)
        self.forget()

    def forget(self) -> None:
        """End the present step without a trace."""
        self.clip_limit = self.spike = None
        self._norm = self._loss = self._clipped = None
        self._spike_limit = math.inf

    # ---- the device decides ------------------------------------------------------------------------------------------

    def can_defer(self) -> bool:
        """True if the device can decide: spikes are the host's."""
        return self.spikes is None

    def on_device(self, device: torch.device) -> DeviceLimiter:
        """The same limits as tensors on this device; they remember from now on."""
        if self._on_device is None or self._on_device.device != device:
            self._fetch()
            assert self.policy.adaptive is not None
            self._on_device = DeviceLimiter(
                self.policy.adaptive, None if self.rule is None else self.rule.state(), device
            )
        return self._on_device

    def _fetch(self) -> None:
        """Bring what the device remembers back to the host, which goes on from there."""
        if self._on_device is not None:
            state, self._on_device = self._on_device.state(), None
            if self.rule is not None and state is not None:
                self.rule.load(state)

    # ---- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data and float64 tensors: `clip` and `spikes`, None where there is nothing to remember."""
        held = None if self._on_device is None else self._on_device.state()
        clip = None
        if self.rule is not None:
            clip = {"rule": self.rule.name, **(self.rule.state() if held is None else held)}
        return {"clip": clip, "spikes": None if self.spikes is None else self.spikes.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`: all of it or nothing. What `state` has None for stays as it is.

        Raises:
            ValueError: if it is another rule's, or no such state.
        """
        rule = _rule_for(self.policy.adaptive)
        clip, spikes = state.get("clip"), state.get("spikes")
        if clip is not None and rule is not None:
            if clip.get("rule") != rule.name:
                raise ValueError(
                    f"clip: it is that of AdaptiveClip({clip.get('rule')!r}), this optimizer has "
                    f"AdaptiveClip({rule.name!r})"
                )
            rule.load(clip)
            self.rule = rule
        if spikes is not None and self.spikes is not None:
            self.spikes.load(spikes)
        if clip is not None and rule is not None:
            self.rule, self._on_device = rule, None
        self.forget()


def limits_for(policy: Policy, former: Limits | None = None) -> Limits | None:
    """The limits that the options ask for, None if none; what `former` remembers goes along where it still fits."""
    if policy.adaptive is None and policy.on_spike is None:
        return None
    limits = Limits(policy)
    if former is not None:
        state = former.state()
        same = former.rule is not None and limits.rule is not None and former.rule.name == limits.rule.name
        limits.load({**state, "clip": state["clip"] if same else None})
    return limits


def _rule_for(adaptive: AdaptiveClip | None) -> Rule | None:
    if adaptive is None or adaptive.rule == "agc":
        return None
    options = adaptive.options()
    options.pop("max_norm")
    return AutoClip(**options) if adaptive.rule == "autoclip" else ZClip(**options)
