"""What checking and clipping one step costs, each way, measured in one run in random order."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import nanscan
from nanscan.bench.peers import loop_clip
from nanscan.bench.timing import Command, Plan, interleave
from nanscan.demo.data import Digits
from nanscan.demo.model import DigitNet

__all__ = ["Cost", "measure_cost"]

WAYS = ("step", "loop", "torch_clip", "nanscan")


@dataclass(frozen=True)
class Cost:
    """Medians over `rounds`, in microseconds.

    Attributes:
        rounds: how often each way was timed; every round runs each way once, in random order.
        tensors: how many gradients the model has.
        elements: how many numbers they hold.
        step_us: the bare optimizer step, which neither checks nor clips.
        loop_us: what the Python loop of `isnan(...).any()`, norm and clip per parameter adds to it.
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


def measure_cost(
    digits: Digits, clip_norm: float, rounds: int, seed: int, watcher: Callable[[str, int, int], None]
) -> Cost:
    """Time one step each way, on equal copies of the model with the same gradients.

    Each way is compared with the bare step of the same round.

    Args:
        digits: where the one batch comes from that makes the gradients.
        clip_norm: the norm to clip to; the gradients have four times it, so that clipping always acts.
        rounds: how often to time each way.
        seed: of the model and of the order.
        watcher: is told `("cost", done, of)`.

    Returns:
        The medians.
    """
    torch.manual_seed(seed)
    model = DigitNet()
    gradients = _gradients(model, digits, 4 * clip_norm)
    copies = {way: copy.deepcopy(model) for way in WAYS}
    turns = _Turns(rounds * len(WAYS), watcher)

    def prepare() -> None:
        for each in copies.values():
            _lay_in(each, gradients)
        turns.count()

    commands = {way: _command(way, each, clip_norm) for way, each in copies.items()}
    plan = Plan(seconds=0.0, min_rounds=rounds, max_rounds=rounds, prepare=prepare, seed=seed)
    samples = interleave(commands, plan).samples
    added = {way: _median_difference(samples[way], samples["step"]) for way in WAYS}
    return Cost(
        rounds=rounds,
        tensors=len(gradients),
        elements=sum(gradient.numel() for gradient in gradients),
        step_us=1e6 * statistics.median(samples["step"]),
        loop_us=added["loop"],
        torch_clip_us=added["torch_clip"],
        nanscan_us=added["nanscan"],
    )


class _Turns:
    """Counts turns for the progress bar; the first few, which warm up, are not among them."""

    def __init__(self, total: int, watcher: Callable[[str, int, int], None]) -> None:
        self._done, self._total, self._watcher = -3 * len(WAYS), total, watcher

    def count(self) -> None:
        self._done += 1
        if self._done > 0:
            self._watcher("cost", self._done, self._total)


def _command(way: str, model: nn.Module, clip_norm: float) -> Command:
    """One step of a fused AdamW, checked and clipped this way."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    if way == "nanscan":
        return nanscan.wrap(optimizer, model, clip_norm=clip_norm).step
    if way == "loop":
        return lambda: loop_clip(parameters, clip_norm) and optimizer.step()
    if way == "torch_clip":
        return lambda: (nn.utils.clip_grad_norm_(parameters, clip_norm), optimizer.step())
    return optimizer.step


def _lay_in(model: nn.Module, gradients: list[Tensor]) -> None:
    """The gradients, unclipped again."""
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient.clone()
        else:
            parameter.grad.copy_(gradient)


def _median_difference(seconds: list[float], base: list[float]) -> float:
    """Microseconds: the median over the rounds of what this way took more than the other in the same round."""
    return 1e6 * statistics.median(mine - other for mine, other in zip(seconds, base, strict=True))


def _gradients(model: nn.Module, digits: Digits, norm: float) -> list[Tensor]:
    """The gradients of one real batch, scaled to the joint 2-norm `norm`."""
    loss = nn.functional.cross_entropy(model(digits.train_images[:64]), digits.train_labels[:64])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    factor = norm / nn.utils.get_total_norm(gradients)
    return [gradient * factor for gradient in gradients]
