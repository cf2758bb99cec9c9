"""Lightning's wrapper of an optimizer around a guarded one: what `self.optimizers()` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanscan.guard import GuardedOptimizer
from nanscan.integrations.lightning.around import AroundSteps
from nanscan.wrappers import derived_kind

__all__ = ["lightning_optimizer"]


def lightning_optimizer(present: Any, guard: GuardedOptimizer, around: AroundSteps) -> Any:
    """A `LightningOptimizer` in place of `present` whose steps are those of `guard`.

    Everything that is not Lightning's own is read from, and set in, the guard: see `nanscan.wrappers`.

    Args:
        present: the `LightningOptimizer` that the strategy has made.
        guard: the guarded optimizer.
        around: is called before and after each step.
    """
    base: Any = derived_kind(type(present))

    class LightningGuardedOptimizer(base):  # type: ignore[misc]
        def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            try:
                return base.step(self, around.before_step(guard, closure), **kwargs)
            finally:
                around.after_step(guard)

    made = LightningGuardedOptimizer(guard)
    made._strategy = present._strategy
    return made
