"""`GradScaler`: torch's gradient scaler, whose check is the scan that a guarded optimizer makes anyway."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from nanscan import messages
from nanscan.guard import GuardedOptimizer
from nanscan.scaling import misuse
from nanscan.scaling.judge import ScaleRule, ScaleWatch
from nanscan.scaling.scaled_step import ScaledStep
from nanscan.scaling.unscale import check, check_and_unscale, is_served

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
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

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 1.0,
        hysteresis: int = 1,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if self._enabled:
            misuse.check_options(init_scale, min_scale, hysteresis)
        self._min_scale = float(min_scale)
        self._hysteresis = hysteresis
        self._init_spent = 0
        self._spent: Tensor | None = None  # overflowing steps in a row, where hysteresis counts them
        self._hinted = False
        self._watches: weakref.WeakKeyDictionary[Any, ScaleWatch] = weakref.WeakKeyDictionary()

    # ---- the step ----------------------------------------------------------------------------------------------------

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
        stage = self._per_optimizer_states[id(optimizer)]["stage"]
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
            return optimizer.step(*args, **kwargs)
        self._check_scaled("step")
        inner = optimizer.optimizer if isinstance(optimizer, GuardedOptimizer) else optimizer
        if any(args) or kwargs.get("closure") is not None or isinstance(inner, torch.optim.LBFGS):
            raise misuse.closure_given()
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise misuse.stepped_twice()
        if isinstance(optimizer, GuardedOptimizer):
            return self._guarded_step(optimizer, state, kwargs)
        return self._bare_step(optimizer, state, kwargs)

    def _guarded_step(self, optimizer: GuardedOptimizer, state: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        """The guard scans, decides and steps; it is told the scale and tells whether the gradients overflowed."""
        assert self._scale is not None
        unscaled = state["stage"] is OptState.UNSCALED
        rule = ScaleRule(self._min_scale, self._growth_interval, self._backoff_factor, self._hysteresis)
        watch = self._watches.setdefault(optimizer, ScaleWatch())
        has_gradients = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        scaled = ScaledStep(self._scale, rule, watch, unscaled, False if has_gradients else None)
        own = vars(optimizer)
        own["scaled_step"] = scaled
        own["grad_scale"] = None if unscaled else self._scale
        own["found_inf"] = _largest(state["found_inf_per_device"].values(), self._scale.device)
        try:
            result = optimizer.step(**kwargs)
            state["stage"] = OptState.STEPPED
            return result
        finally:
            for name in ("scaled_step", "grad_scale", "found_inf"):
                own.pop(name, None)
            self._note(state["found_inf_per_device"], scaled.overflow)
            if isinstance(scaled.overflow, bool) and optimizer.last_report is not None:
                scaled.watch_step(optimizer.last_report)

    def _note(self, flags: dict[torch.device, Tensor], overflow: bool | Tensor | None) -> None:
        """Put the guard's finding where `update` looks, beside those of `unscale_`."""
        assert self._scale is not None
        if overflow is None:
            return
        device = self._scale.device
        if not isinstance(overflow, Tensor):
            overflow = torch.full((), float(overflow), dtype=torch.float32, device=device)
        flags[device] = overflow if device not in flags else torch.maximum(flags[device], overflow.to(device))

    def _bare_step(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], kwargs: dict[str, Any]) -> Any:
        if not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            if not self._hinted:
                self._hinted = True
                messages.warn(misuse.no_gradients(), UserWarning)
            state["stage"] = OptState.STEPPED
            return optimizer.step(**kwargs)
        return super().step(optimizer, **kwargs)

    def _check_scaled(self, called: str) -> None:
        if self._scale is None:
            raise misuse.not_scaled(called)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """For an optimizer that unscales by itself: only a read."""
        if self._scale is None or not is_served(optimizer, cuda=True):
            return super()._check_inf_per_device(optimizer)
        flags: dict[Any, Any] = check(optimizer, self._scale.device)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not is_served(optimizer, cuda=False):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return check_and_unscale(optimizer, inv_scale, found_inf.device, allow_fp16)

    # ---- the scale ---------------------------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Lower the scale if gradients overflowed in a step since the last `update`, or grow it when it is time.

        A step without gradients says nothing about the scale and leaves it.

        Args:
            new_scale: the scale from now on, in place of that; a number or a tensor of one element.

        Raises:
            RuntimeError: if there was no `step` since the last `update`.
            ValueError: if `new_scale` is a number that is not positive and finite, or below `min_scale`.
        """
        if not self._enabled:
            return
        self._check_scaled("update")
        assert self._scale is not None
        if new_scale is not None:
            self._set_scale(new_scale)
            return
        states = self._per_optimizer_states
        flags = [flag for state in states.values() for flag in state["found_inf_per_device"].values()]
        if not flags:
            if not any(state["stage"] is not OptState.READY for state in states.values()):
                raise misuse.no_step()
            states.clear()
            return
        found = _largest(flags, self._scale.device)
        states.clear()
        states[0]["found_inf_per_device"] = {self._scale.device: found}
        before = self._spare(found) if self._hysteresis > 1 else None
        super().update()
        if before is not None:
            self._scale.copy_(torch.where(before > 0, before, self._scale))
        self._scale.clamp_(min=self._min_scale)

    def _spare(self, found: Tensor) -> Tensor:
        """The scale where an overflow is one that hysteresis spares it, else 0; counts it."""
        assert self._scale is not None
        if self._spent is None:
            self._spent = torch.full((), self._init_spent, dtype=torch.int32, device=self._scale.device)
        bad = found > 0
        self._spent.copy_(torch.where(bad, self._spent + 1, 0))
        return torch.where(bad & (self._spent < self._hysteresis), self._scale, 0.0)

    def _set_scale(self, new_scale: float | Tensor) -> None:
        assert self._scale is not None
        if not isinstance(new_scale, Tensor):
            new_scale = float(new_scale)
            misuse.check_scale("new_scale", new_scale, self._min_scale)
        super().update(new_scale)
        self._scale.clamp_(min=self._min_scale)

    def get_min_scale(self) -> float:
        """The scale never goes below this."""
        return self._min_scale

    def get_hysteresis(self) -> int:
        """How many overflowing steps in a row lower the scale."""
        return self._hysteresis

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The five entries of torch's, which loads this too, and `min_scale`, `hysteresis`, `_hysteresis_tracker`."""
        if not self._enabled:
            return {}
        return {
            **super().state_dict(),
            "min_scale": self._min_scale,
            "hysteresis": self._hysteresis,
            "_hysteresis_tracker": self._get_spent(),
        }

    def _get_spent(self) -> int:
        return self._init_spent if self._spent is None else int(self._spent.item())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of `torch.amp.GradScaler`.

        A saved scale that had collapsed is mended, with a warning: it becomes `min_scale`, or the present scale where
        it is NaN or Inf.

        Raises:
            RuntimeError: if the state is empty: it was saved by a scaler that is not enabled.
        """
        if not self._enabled:
            return
        present = self.get_scale()
        super().load_state_dict(state_dict)
        self._min_scale = float(state_dict.get("min_scale", self._min_scale))
        self._hysteresis = int(state_dict.get("hysteresis", self._hysteresis))
        self._init_spent = int(state_dict.get("_hysteresis_tracker", 0))
        self._spent = None
        saved = float(state_dict["scale"])
        mended = misuse.mended(saved, self._min_scale, present)
        if mended != saved:
            messages.warn(misuse.collapsed_state(saved, mended), UserWarning)
            self._init_scale = mended
            if self._scale is not None:
                self._scale.fill_(mended)

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and len(self._per_optimizer_states):
            raise misuse.pickled_early()
        state = super().__getstate__()
        return {**state, "_init_spent": self._get_spent(), "_spent": None, "_watches": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_watches": weakref.WeakKeyDictionary()})


def _largest(flags: Any, device: torch.device) -> Tensor | None:
    """The largest of several found_inf flags, on `device`; None if there is none."""
    largest: Tensor | None = None
    for flag in flags:
        flag = flag.to(device, non_blocking=True)
        largest = flag if largest is None else torch.maximum(largest, flag)
    return largest
