"""The loss scale: how it moves, its lower limit and its hysteresis, and how it is saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.cuda.amp.common import amp_definitely_not_available

from nanscan import messages
from nanscan.scaling import misuse
from nanscan.scaling.judge import ScaleRule

__all__ = ["LossScale", "largest"]


class LossScale(torch.amp.GradScaler):
    """A gradient scaler with a lower limit and hysteresis; `nanscan.GradScaler` documents the arguments."""

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
        if enabled and device == "cuda" and amp_definitely_not_available():  # type: ignore[no-untyped-call]
            messages.warn(misuse.no_cuda(), UserWarning)
            enabled = False
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if self._enabled:
            misuse.check_options(init_scale, min_scale, hysteresis)
        self._min_scale = float(min_scale)
        self._hysteresis = hysteresis
        self._init_spent = 0
        self._spent: Tensor | None = None  # overflowing steps in a row, where hysteresis counts them

    def _rule(self) -> ScaleRule:
        return ScaleRule(self._min_scale, self._growth_interval, self._backoff_factor, self._hysteresis)

    def _check_scaled(self, called: str) -> Tensor:
        """The scale; raises where there is none yet."""
        if self._scale is None:
            raise misuse.not_scaled(called)
        return self._scale

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
        scale = self._check_scaled("update")
        if new_scale is not None:
            self._set_scale(new_scale, scale)
            return
        states = self._per_optimizer_states
        flags = [flag for state in states.values() for flag in state["found_inf_per_device"].values()]
        if not flags:
            if not any(state["stage"] is not OptState.READY for state in states.values()):
                raise misuse.no_step()
            states.clear()
            return
        found = largest(flags, scale.device)
        states.clear()
        states[0]["found_inf_per_device"] = {scale.device: found}
        spared = self._spared(found, scale) if self._hysteresis > 1 else None
        super().update()
        if spared is not None:
            scale.copy_(torch.maximum(spared, scale))
        scale.clamp_(min=self._min_scale)

    def _spared(self, found: Tensor, scale: Tensor) -> Tensor:
        """The scale that must stay as it is where hysteresis spares it an overflow, else 0; counts the overflow."""
        if self._spent is None:
            self._spent = torch.full((), self._init_spent, dtype=torch.int32, device=scale.device)
        bad = found > 0
        self._spent.copy_(torch.where(bad, self._spent + 1, 0))
        return torch.where(bad & (self._spent < self._hysteresis), scale, 0.0)

    def _set_scale(self, new_scale: float | Tensor, scale: Tensor) -> None:
        if not isinstance(new_scale, Tensor):
            new_scale = float(new_scale)
            misuse.check_scale("new_scale", new_scale, self._min_scale)
        super().update(new_scale)
        scale.clamp_(min=self._min_scale)

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
        return {**state, "_init_spent": self._get_spent(), "_spent": None}


def largest(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """The largest of some found_inf flags, on `device`; no flag at all is 0.0."""
    found = torch.zeros((), dtype=torch.float32, device=device)
    for flag in flags:
        found = torch.maximum(found, flag.to(found, non_blocking=True))
    return found
