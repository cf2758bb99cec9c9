"""A tensor that stands for the gradient norm of a step that is still to come, so that nobody scans twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import nanscan

__all__ = ["LateNorm"]


class LateNorm(Tensor):
    """A 0-dim tensor: the norm of the gradients before clipping, as the guard finds it in the step that follows.

    Whatever is done with it reads the norm then, also when later steps were taken; before the step it costs a scan.
    """

    _made: Callable[[], Tensor]

    @classmethod
    def of(cls, accelerator: Any, optimizer: Any, parameters: Iterable[Tensor]) -> LateNorm:
        """The norm of the step that comes next.

        Args:
            accelerator: the `accelerate.Accelerator`; it unscales where the norm is read before the step.
            optimizer: the `PreparedOptimizer` that will step.
            parameters: those whose norm it is where it is read before the step.
        """
        norm = torch.Tensor._make_subclass(cls, torch.tensor(float("nan"), device="cpu"))
        step, parameters = optimizer._steps, list(parameters)

        def made() -> Tensor:
            if optimizer._steps > step:
                return torch.tensor(_norm_of(optimizer, step), device="cpu")
            accelerator.unscale_gradients()
            return nanscan.clip_grad_norm_(parameters, None)

        norm._made = made
        return norm

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(LateNorm, lambda item: item._made(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _norm_of(optimizer: Any, step: int) -> float:
    reports = (optimizer.last_report, *reversed(optimizer.history))
    for report in reports:
        if report is not None and report.step == step:
            return float(report.norm)
    raise RuntimeError(
        f"nanscan: the gradient norm of step {step} is no longer known (history={len(optimizer.history)} steps are "
        "kept): read it after its step, with float(norm)"
    )
