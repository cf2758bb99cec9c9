"""`GradScaler`: torch's gradient scaler, whose check is the scan that a guarded optimizer makes anyway."""

from __future__ import annotations

import functools
import weakref
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from nanscan import engine, messages
from nanscan.fused import ready_to_skip, takes_scale
from nanscan.guard import GuardedOptimizer
from nanscan.scaling import misuse
from nanscan.scaling.bare import Seen
from nanscan.scaling.loss_scale import LossScale, largest
from nanscan.scaling.scaled_step import ScaledStep
from nanscan.scaling.unscale import check, is_served, refuse_float16

__all__ = ["GradScaler"]


class GradScaler(LossScale):
    """A `torch.amp.GradScaler` that reads the gradients of a guarded optimizer once, and says why a scale collapses.

    Use it as torch's: `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`. With an optimizer
    from `nanscan.wrap` one scan checks, unscales, takes the norm, clips and decides; a fused optimizer divides the
    gradients itself. With any other optimizer it behaves as torch's, and the check is the scan. Only a NaN or Inf in
    gradients lowers the scale: a step that the guard skips because the observed loss is NaN leaves it.

    Args:
        device: type of the device that the loss is on, `"cuda"` or `"cpu"` or another that torch knows.
        init_scale: what the loss is multiplied by at first, > 0.
        growth_factor: the scale is multiplied by it after `growth_interval` good steps in a row, > 1.
        backoff_factor: the scale is multiplied by it when gradients overflow, < 1.
        growth_interval: good steps in a row before the scale grows.
        enabled: False makes every method pass on what it is given.
        min_scale: the scale never goes below it, >= 0. A NaN or Inf at this scale is not the scale's fault, and said
            to be a true one. 0: no limit, as in torch.
        hysteresis: so many overflowing steps in a row lower the scale, and then each further one; a good step starts
            the count anew (the rule of NVIDIA apex's `update_scale_hysteresis`). Each of them is skipped and starts
            the growth interval anew. 1: every overflow lowers the scale, as in torch.

    Raises:
        ValueError: if `init_scale` is not positive, finite and at least `min_scale`, or another number can't be used.
        TypeError: if `hysteresis` is no int.

    >>> import torch, nanscan
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=1.0), clip_norm=10.0)
    >>> scaler = nanscan.GradScaler("cpu", init_scale=1024.0)
    >>> scaler.scale((weight * 0.25).sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> weight.tolist(), scaler.get_scale()
    ([0.75, 0.75], 1024.0)
    """

    _hinted = False  # that there are no gradients

    @functools.cached_property
    def _seen(self) -> weakref.WeakKeyDictionary[Any, Seen]:
        return weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_seen"}

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the loss scale, to look at them or change them before `step`.

        Not needed for clipping with a guarded optimizer.

        Raises:
            RuntimeError: if it was called before since the last `update()`, or no loss was scaled.
            ValueError: if there are float16 gradients.
        """
        if not self._enabled:
            return
        self._check_scaled("unscale_")
        stage = self._state_of(optimizer)["stage"]
        if stage is OptState.UNSCALED:
            raise misuse.unscaled_twice()
        if stage is OptState.STEPPED:
            raise misuse.unscaled_late()
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale the gradients, check them, and step or skip.

        Args:
            optimizer: guarded or not.
            args, kwargs: handed on to its `step`; no closure.

        Returns:
            What the optimizer's `step` returned, None for a skipped step.

        Raises:
            RuntimeError: if it was called before since the last `update()`, no loss was scaled, or a closure is given.
        """
        if not self._enabled:
            return cast("float | None", optimizer.step(*args, **kwargs))
        scale = self._check_scaled("step")
        inner = optimizer.optimizer if isinstance(optimizer, GuardedOptimizer) else optimizer
        if (
            any(each is not None for each in args)
            or kwargs.get("closure") is not None
            or isinstance(inner, torch.optim.LBFGS)
        ):
            raise misuse.closure_given()
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise misuse.stepped_twice()
        if isinstance(optimizer, GuardedOptimizer):
            result = self._guarded_step(optimizer, scale, state, kwargs)
        else:
            result = self._bare_step(optimizer, scale, state, kwargs)
        state["stage"] = OptState.STEPPED
        return cast("float | None", result)

    def _state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimizer; a guard and the optimizer inside have one, whichever of them is named."""
        states = self._per_optimizer_states
        if isinstance(optimizer, GuardedOptimizer) and id(optimizer) not in states:
            states[id(optimizer)] = states[id(optimizer.optimizer)]
        return states[id(optimizer)]

    def _guarded_step(
        self, optimizer: GuardedOptimizer, scale: Tensor, state: dict[str, Any], kwargs: dict[str, Any]
    ) -> Any:
        """The guard scans, decides and steps; it is told the scale and tells whether the gradients overflowed."""
        unscaled, flags = state["stage"] is OptState.UNSCALED, state["found_inf_per_device"]
        scaled = ScaledStep(scale, self._rule(), self._about(optimizer).watch, unscaled, _has_gradients(optimizer))
        own = vars(optimizer)
        own["scaled_step"] = scaled
        own["grad_scale"] = None if unscaled else scale
        own["found_inf"] = largest(flags.values(), scale.device) if flags else None
        try:
            return optimizer.step(**kwargs)
        finally:
            for name in ("scaled_step", "grad_scale", "found_inf"):
                own.pop(name, None)
            if scaled.overflow is not None:
                _note(flags, scaled.overflow, scale.device)
            if isinstance(scaled.overflow, bool) and optimizer.last_report is not None:
                scaled.watch_step(optimizer.last_report)

    def _bare_step(
        self, optimizer: torch.optim.Optimizer, scale: Tensor, state: dict[str, Any], kwargs: dict[str, Any]
    ) -> Any:
        if not _has_gradients(optimizer):
            if not self._hinted:
                self._hinted = True
                messages.warn(misuse.no_gradients(), UserWarning)
            return optimizer.step(**kwargs)
        if takes_scale(optimizer):
            ready_to_skip(optimizer)
        known = float(scale) if scale.device.type == "cpu" else 1.0
        result = super().step(optimizer, **kwargs)
        vars(optimizer)["_opt_called"] = True  # else a scheduler says after a skip that step() was forgotten
        self._about(optimizer).finish(optimizer, known, self._rule())
        return result

    def _about(self, optimizer: torch.optim.Optimizer) -> Seen:
        if optimizer not in self._seen:
            self._seen[optimizer] = Seen()
        return self._seen[optimizer]

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """For an optimizer that unscales by itself: only a read."""
        scale = self._check_scaled("step")
        if not is_served(optimizer, cuda=True):
            return super()._check_inf_per_device(optimizer)
        flags = self._checked(optimizer, scale.device)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def _checked(self, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[Any, Tensor]:
        finding = check(optimizer, device)
        if not isinstance(optimizer, GuardedOptimizer):
            self._about(optimizer).scan = finding.scan
        return {} if finding.flag is None else {device: finding.flag}

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not is_served(optimizer, cuda=False):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not allow_fp16:
            refuse_float16(optimizer)
        flags = self._checked(optimizer, found_inf.device)
        if flags:
            engine.scale_grads_(optimizer.param_groups, float(inv_scale))
        return flags


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _note(flags: dict[torch.device, Tensor], overflow: bool | Tensor, device: torch.device) -> None:
    """Put the guard's finding where `update` looks, beside that of `unscale_`."""
    if not isinstance(overflow, Tensor):
        overflow = torch.full((), float(overflow), dtype=torch.float32, device=device)
    flags[device] = largest([overflow, *flags.values()], device)
