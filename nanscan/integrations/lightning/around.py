"""What a guarded step of a Trainer needs before and after it: its loss, gradients as hooks expect them, its limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nanscan.guard import GuardedOptimizer
from nanscan.integrations.lightning.clipping import ClipRequests
from nanscan.integrations.lightning.setup import hooks_look_at_gradients

__all__ = ["AroundSteps"]

Closure = Callable[[], Any]


class AroundSteps:
    """What happens around the steps of the guards of one Trainer.

    Args:
        trainer: whose precision plugin may have a gradient scaler.
        module: the LightningModule.
        guards: its guarded optimizers.
        clips: the clipping that is asked for.
    """

    def __init__(self, trainer: Any, module: Any, guards: Sequence[GuardedOptimizer], clips: ClipRequests) -> None:
        self._trainer = trainer
        self._automatic = module.automatic_optimization
        self._scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        self._unscales = self._scaler is not None and hooks_look_at_gradients(trainer, module)
        self._alone = guards[0] if len(guards) == 1 else None  # with several: whose loss is it?
        self._clips = clips
        self._loss: Any = None  # that the guard hears of from the closure of its step, if the step has one

    def backward(self, loss: Any) -> None:
        """Let the losses join the scan that the guard does not get from the closure of its step."""
        if self._alone is None:
            return
        if self._scaler is not None:
            self._alone.observe(loss.detach() / self._scaler.scale(loss.new_ones(())))
        elif not self._automatic or self._trainer.fit_loop._should_accumulate():
            self._alone.observe(loss)
        else:
            self._loss = loss

    def before_step(self, guard: GuardedOptimizer, closure: Closure | None) -> Closure | None:
        """The closure that the step is to use."""
        if closure is None and self._loss is not None and guard is self._alone:  # the module has run it itself
            guard.observe(self._loss)
        self._loss = None
        if self._unscales and not getattr(guard.optimizer, "_step_supports_amp_scaling", False):
            return partial(self._unscaled_after, guard, closure)
        return closure

    def after_step(self, guard: GuardedOptimizer) -> None:
        """The step is over, or has raised."""
        self._loss = None
        self._clips.step_done(guard)

    def _unscaled_after(self, guard: GuardedOptimizer, closure: Closure | None) -> Any:
        """Run the closure; hooks then find the gradients without the loss scale, as they do without the guard."""
        result = None if closure is None else closure()
        if result is not None or not self._automatic:  # else `training_step` has returned None
            self._scaler.unscale_(guard)
        return result
