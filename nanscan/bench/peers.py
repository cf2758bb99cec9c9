"""What nanscan is compared with: other ways to learn whether the gradients are finite and how large they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nanscan import engine
from nanscan.bench.gradients import Gradients
from nanscan.bench.timing import Command

__all__ = ["FLAT_READS", "check_commands", "flat_reads", "loop_check", "loop_clip"]

FLAT_READS = ("flat sum", "flat dot", "flat sum (own dtype)")


def loop_check(parameters: Sequence[torch.nn.Parameter]) -> tuple[bool, float]:
    """The loop that people write: ``isnan`` and ``isinf`` per parameter, then a norm per parameter.

    Returns:
        Whether something is non-finite, and the total 2-norm.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> loop_check([p])
        (False, 5.0)
    """
    bad, total = False, 0.0
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if torch.isnan(grad).any() or torch.isinf(grad).any():
            bad = True
        total += grad.norm(2).item() ** 2
    return bad, math.sqrt(total)


def loop_clip(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> bool:
    """The loop with clipping: check, norm, then scale each gradient in place. Returns whether to step."""
    bad, norm = loop_check(parameters)
    if norm > max_norm and not bad:
        factor = max_norm / (norm + 1e-6)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    return not bad


def check_commands(made: Gradients) -> dict[str, Command]:
    """Ours and the peers: "finite? how large?" from the list of parameters (the scaler's check: only the first)."""
    groups, parameters = made.param_groups, made.parameters
    found, scale = torch.zeros(1, device=made.flat.device), torch.ones(1, device=made.flat.device)

    def foreach() -> torch.Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def scaler() -> None:
        grads = [p.grad for p in parameters if p.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)

    return {
        "ours": lambda: engine.scan_grads(groups).finite,
        "loop": lambda: loop_check(parameters),
        "foreach": foreach,
        "scaler": scaler,
        **flat_reads(made.flat),
    }


def flat_reads(flat: torch.Tensor) -> dict[str, Command]:
    """Reads of one flat buffer, the fastest of which is the limit per byte.

    A half-precision buffer is read as the float32 numbers that its bytes spell, too: the limit is one of bytes, and
    torch's half-precision sums are not always at it.
    """
    words = flat.view(torch.float32)
    reads: dict[str, Command] = {
        "flat sum": lambda: torch.sum(words),
        "flat dot": lambda: torch.dot(words, words),
    }
    if flat.dtype != torch.float32:
        reads["flat sum (own dtype)"] = lambda: torch.sum(flat)
    return reads
