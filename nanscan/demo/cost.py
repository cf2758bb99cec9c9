"""What checking and clipping one step costs, each way, measured in one run in random order."""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import nanscan
from nanscan.demo.data import Digits
from nanscan.demo.model import DigitNet

__all__ = ["Cost", "loop_step", "measure_cost"]

WARM_UP = 10  # rounds that are not counted


@dataclass(frozen=True)
class Cost:
    """Medians over `rounds`, in microseconds.

    Attributes:
        rounds: how often each way was timed; every round runs each way once, in random order.
        tensors: how many gradients the model has.
        elements: how many numbers they hold.
        step_us: the bare optimizer step, which neither checks nor clips.
        loop_us: what the Python loop of `isnan(...).any()` per parameter, norm and clip adds to it.
        torch_clip_us: what `torch.nn.utils.clip_grad_norm_` adds to it (it clips, and checks nothing).
        nanscan_us: what the guard adds to it (it checks, names and clips).
    """

    rounds: int
    tensors: int
    elements: int
    step_us: float
    loop_us: float
    torch_clip_us: float
    nanscan_us: float


def loop_step(model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float) -> bool:
    """The loop that many training scripts hold: look at each gradient, add up the norm, clip, step.

    Returns:
        True if the optimizer stepped, False if a NaN or Inf was found.
    """
    total = 0.0
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        if torch.isnan(parameter.grad).any() or torch.isinf(parameter.grad).any():
            return False
        total += parameter.grad.norm().item() ** 2
    factor = clip_norm / (total**0.5 + 1e-6)
    if factor < 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    optimizer.step()
    return True


def measure_cost(
    digits: Digits, clip_norm: float, rounds: int, seed: int, watcher: Callable[[str, int, int], None]
) -> Cost:
    """Time one step each way, on equal copies of the model with the same gradients.

    A fixed order would favour whoever finds the caches warm: the order is drawn anew in each round, and each way is
    compared with the bare step of the same round.

    Args:
        digits: where the one batch comes from that makes the gradients.
        clip_norm: the norm to clip to; the gradients are scaled to four times it, so that clipping always acts.
        rounds: how often to time each way.
        seed: of the model and of the order.
        watcher: is told `("cost", done, of)`.

    Returns:
        The medians.
    """
    torch.manual_seed(seed)
    model = DigitNet()
    gradients = _gradients(model, digits, 4 * clip_norm)
    lanes = {name: _Lane(name, model, clip_norm) for name in ("step", "loop", "torch_clip", "nanscan")}
    order, shuffle = list(lanes), random.Random(seed).shuffle
    seconds: list[dict[str, float]] = []
    for done in range(WARM_UP + rounds):
        shuffle(order)
        seconds.append({name: lanes[name].time(gradients) for name in order})
        watcher("cost", done + 1, WARM_UP + rounds)
    counted = seconds[WARM_UP:]

    def added(name: str) -> float:
        return 1e6 * statistics.median(row[name] - row["step"] for row in counted)

    return Cost(
        rounds=rounds,
        tensors=len(gradients),
        elements=sum(gradient.numel() for gradient in gradients),
        step_us=1e6 * statistics.median(row["step"] for row in counted),
        loop_us=added("loop"),
        torch_clip_us=added("torch_clip"),
        nanscan_us=added("nanscan"),
    )


class _Lane:
    """One way of making a step, with its own copy of the model, the gradients and the optimizer's state."""

    def __init__(self, name: str, model: nn.Module, clip_norm: float) -> None:
        self.model = copy.deepcopy(model)
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        if name == "nanscan":
            self.step: Callable[[], object] = nanscan.wrap(inner, self.model, clip_norm=clip_norm).step
        elif name == "loop":
            self.step = lambda: loop_step(self.model, inner, clip_norm)
        elif name == "torch_clip":
            self.step = lambda: (nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm), inner.step())
        else:
            self.step = inner.step

    def time(self, gradients: list[Tensor]) -> float:
        """Seconds of one step on these gradients; laying them in is not counted."""
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def _gradients(model: nn.Module, digits: Digits, norm: float) -> list[Tensor]:
    """The gradients of one real batch, scaled to the joint 2-norm `norm`."""
    loss = nn.functional.cross_entropy(model(digits.train_images[:64]), digits.train_labels[:64])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    factor = norm / torch.nn.utils.get_total_norm(gradients)
    return [gradient * factor for gradient in gradients]
