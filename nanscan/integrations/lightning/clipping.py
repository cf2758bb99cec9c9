"""Clipping that Lightning is asked for, done by the guard: `gradient_clip_val` and `self.clip_gradients(...)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nanscan.guard import GuardedOptimizer
from nanscan.policy import Policy

__all__ = ["ClipRequests"]


class ClipRequests:
    """Takes the place of the precision plugin's `clip_gradients` while it is open.

    Lightning would clip before the guard looks, which makes every gradient NaN where one was, and it refuses to clip
    for optimizers that unscale by themselves. Here a request sets the limit of the coming step of the guard, which
    clips by it in the same pass; after the step the guard's own limits hold again.

    Args:
        plugin: the strategy's precision plugin.
        guards: the optimizers whose requests are taken over.
    """

    def __init__(self, plugin: Any, guards: Sequence[GuardedOptimizer]) -> None:
        self._plugin = plugin
        self._guards = list(guards)
        self._own: dict[int, Policy] = {}  # of guards that clip by a request at present
        self._original: Callable[..., None] = plugin.clip_gradients
        plugin.clip_gradients = self._clip

    def close(self) -> None:
        """Let the plugin clip again, and the guards by their own limits."""
        vars(self._plugin).pop("clip_gradients", None)
        for guard in self._guards:
            self.step_done(guard)

    def step_done(self, guard: GuardedOptimizer) -> None:
        """The step that a request was made for is over."""
        own = self._own.pop(id(guard), None)
        if own is not None:
            guard._set_policy(own)

    def _clip(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        guard = self._guard_of(optimizer)
        if guard is None:
            self._original(optimizer, clip_val=clip_val, gradient_clip_algorithm=gradient_clip_algorithm)
        elif clip_val > 0:
            self.step_done(guard)
            refuse_two_limits(guard, f"Lightning was asked to clip by {clip_val}")
            by_value = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) == "value"
            self._own[id(guard)] = own = guard.policy
            limit = {"clip_value" if by_value else "clip_norm": clip_val}
            guard._set_policy(replace(own, **limit))  # type: ignore[arg-type]

    def _guard_of(self, optimizer: Any) -> GuardedOptimizer | None:
        known = (optimizer, getattr(optimizer, "_optimizer", None))
        return next((guard for guard in self._guards if guard in known or guard.optimizer in known), None)


def refuse_two_limits(guard: GuardedOptimizer, asked: str) -> None:
    """Raise ValueError if the guard has a limit of its own."""
    policy = guard.policy
    if policy.clip_norm is not None or policy.clip_value is not None:
        raise ValueError(
            f"{asked}, and NanScanCallback has clip_norm={policy.clip_norm}, clip_value={policy.clip_value}: give the "
            "limit once. NanScanCallback(clip_norm=...) without gradient_clip_val and clip_gradients() is the shortest"
        )
