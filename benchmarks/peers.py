"""Peers that need more than torch's eager mode: torch.compile, and the nearest product on PyPI."""

from __future__ import annotations

import tempfile

import torch

from nanscan.bench.step_rows import Twins, half_norm
from nanscan.bench.timing import Command


def compiled_clip_and_step(twins: Twins) -> Command:
    """``clip_grad_norm_`` and the step, compiled together (the first call compiles; it happens here)."""
    parameters, optimizer, max_norm = twins.made.parameters, twins.optimizer(), half_norm(twins.made)

    @torch.compile
    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()

    clip_and_step()
    clip_and_step()
    return clip_and_step


def stabilityguard_step(twins: Twins) -> Command:
    """``stabilityguard.GuardedOptimizer.step``, quiet; it checks and has a norm per parameter, but does not clip."""
    from stabilityguard import GuardedOptimizer

    model = torch.nn.Module()
    for index, parameter in enumerate(twins.made.parameters):
        model.register_parameter(f"p{index}", parameter)
    guard = GuardedOptimizer(twins.optimizer(), model, verbose=False, log_dir=tempfile.mkdtemp(prefix="sg_logs"))

    def step() -> None:
        guard.step()
        if guard.total_skips:
            raise RuntimeError(
                "stabilityguard took the benchmark's constant gradients for a spike: nothing to compare."
            )

    return step
