"""Lightning's wrapper of an optimizer around a guarded one: what `self.optimizers()` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanscan.guard import GuardedOptimizer
from nanscan.integrations.lightning.around import AroundSteps

__all__ = ["lightning_optimizer"]

_OF_THE_INSTANCE = frozenset({"_optimizer", "_strategy", "_on_before_step", "_on_after_step"})


def lightning_optimizer(present: Any, guard: GuardedOptimizer, around: AroundSteps) -> Any:
    """A `LightningOptimizer` in place of `present` whose steps are those of `guard`.

    Lightning derives the class of its wrapper from the optimizer's, so that the methods found there would run on the
    wrapper and keep their state in it: here everything that is not Lightning's own is read from, and set in, the guard.

    Args:
        present: the `LightningOptimizer` that the strategy has made.
        guard: the guarded optimizer.
        around: is called before and after each step.
    """
    base: Any = next(kind for kind in type(present).__mro__ if kind.__name__ == "LightningOptimizer")
    own = _OF_THE_INSTANCE | {name for name in vars(base) if not name.startswith("__")}

    class LightningGuardedOptimizer(base):  # type: ignore[misc]
        def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            try:
                return base.step(self, around.before_step(guard, closure), **kwargs)
            finally:
                around.after_step(guard)

        def __getattribute__(self, name: str) -> Any:
            if name in own or name.startswith("__"):
                return object.__getattribute__(self, name)
            return getattr(guard, name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in own or name.startswith("__"):
                object.__setattr__(self, name, value)
            else:
                setattr(guard, name, value)

    made = LightningGuardedOptimizer(guard)
    made._strategy = present._strategy
    return made
