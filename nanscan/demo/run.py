"""Train twice with the same seed and the same fault, in plain PyTorch and guarded, and compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nanscan
from nanscan.demo.cost import Cost, measure_cost
from nanscan.demo.data import Digits, batch_count, batches, load_digits
from nanscan.demo.model import DigitNet, absent_classes, balanced_loss

__all__ = ["DemoResult", "RunResult", "Settings", "Watcher", "run_demo"]

Watcher = Callable[[str, int, int], None]
"""Is told `(phase, done, of)` after every step; the phases are "plain", "guarded" and "cost"."""


@dataclass(frozen=True)
class Settings:
    """What both runs share. `cost_rounds` is how often each way of checking a step is timed."""

    epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 2e-3
    clip_norm: float = 1.0
    seed: int = 0
    cost_rounds: int = 300


@dataclass(frozen=True)
class RunResult:
    """How one run ended.

    Attributes:
        name: "plain" or "guarded".
        steps: how many times the optimizer was called.
        skipped: how many of these the guard skipped (0 in the plain run).
        first_bad_step: the first step with a NaN or Inf in the loss, from 0; None if there was none.
        absent_classes: the classes that the batch of that step did not hold.
        culprit: the first bad gradient of that step, in words, as the guard names it; None in the plain run.
        finite: True if every weight is finite at the end.
        bad_weights: how many of the `weights` elements are NaN or Inf at the end.
        weights: how many elements the parameters have.
        accuracy: share of the 360 test digits that the final weights read right, 0..1.
    """

    name: str
    steps: int
    skipped: int
    first_bad_step: int | None
    absent_classes: list[int]
    culprit: str | None
    finite: bool
    bad_weights: int
    weights: int
    accuracy: float


@dataclass(frozen=True)
class DemoResult:
    """Both runs, what each way of checking costs, and where the guarded run's log lies."""

    plain: RunResult
    guarded: RunResult
    cost: Cost
    log: str
    engine: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return dataclasses.asdict(self)


def run_demo(log: str | Path, settings: Settings | None = None, watcher: Watcher = lambda *_: None) -> DemoResult:
    """Run the demo.

    Args:
        log: path of the guarded run's JSON-lines log; written anew.
        settings: epochs, batch size, seed, …; default `Settings()`.
        watcher: is told `(phase, done, of)` after every step.

    Returns:
        How both runs ended and what a step of each kind costs.

    Raises:
        nanscan.demo.data.MissingExtra: scikit-learn is not installed.
        OSError: the log can't be written.
    """
    settings = settings or Settings()
    digits = load_digits(settings.seed)
    path = Path(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    with _one_thread():
        plain = _train("plain", digits, settings, watcher, None)
        guarded = _train("guarded", digits, settings, watcher, path)
        cost = measure_cost(digits, settings.clip_norm, settings.cost_rounds, settings.seed, watcher)
    return DemoResult(plain, guarded, cost, str(path), nanscan.engine_info().engine)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The network is too small for more: waking a second thread costs more than the work that it takes over."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(name: str, digits: Digits, settings: Settings, watcher: Watcher, log: Path | None) -> RunResult:
    """One run, guarded if `log` is given. Data, weights at the start and loss are the same in both."""
    torch.manual_seed(settings.seed)
    model = DigitNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, fused=True)
    guard = nanscan.wrap(optimizer, model, clip_norm=settings.clip_norm, log=log) if log else None
    total = batch_count(digits, settings.epochs, settings.batch_size)
    fault = Fault()
    drawn = batches(digits, settings.epochs, settings.batch_size, settings.seed)
    for step, (images, labels) in enumerate(drawn):
        optimizer.zero_grad()
        loss = balanced_loss(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        if guard is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
            optimizer.step()
        else:
            guard.observe(loss)
            guard.step()
        fault.look(step, loss, labels, guard)
        watcher(name, step + 1, total)
    return _result(name, model, digits, total, fault, guard)


@dataclass
class Fault:
    """What is known about the first bad step of a run."""

    step: int | None = None
    absent: list[int] = dataclasses.field(default_factory=list)
    culprit: str | None = None

    def look(self, step: int, loss: Tensor, labels: Tensor, guard: nanscan.GuardedOptimizer | None) -> None:
        """Note the first step whose loss is NaN or Inf, and whom the guard named."""
        if self.step is not None or loss.isfinite():
            return
        self.step, self.absent = step, absent_classes(labels)
        if guard is not None and guard.step_was_skipped and guard.last_report is not None:
            self.culprit = guard.last_report.bad[0].describe()


def _result(
    name: str, model: DigitNet, digits: Digits, steps: int, fault: Fault, guard: nanscan.GuardedOptimizer | None
) -> RunResult:
    weights = nanscan.scan(model)
    with torch.no_grad():
        right = model(digits.test_images).argmax(1).eq(digits.test_labels)
    return RunResult(
        name=name,
        steps=steps,
        skipped=guard.skipped_steps if guard is not None else 0,
        first_bad_step=fault.step,
        absent_classes=fault.absent,
        culprit=fault.culprit,
        finite=weights.finite,
        bad_weights=weights.nan_count + weights.inf_count,
        weights=weights.numel,
        accuracy=right.float().mean().item(),
    )
