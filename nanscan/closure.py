"""Steps with a closure: one evaluation before the step, or several in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from nanscan.engine.result import EngineScan
from nanscan.policy import Action
from nanscan.report import StepReport
from nanscan.snapshot import Snapshot, evaluates_once

if TYPE_CHECKING:
    from nanscan.steps import GuardedSteps

__all__ = ["step_with_closure"]

Closure = Callable[[], Any]


class _Unwind(BaseException):
    """Leaves the inner optimizer's step in the middle; no `except Exception` on the way may stop it."""

    def __init__(self, report: StepReport, action: Action, scan: EngineScan, loss: Any) -> None:
        super().__init__(report.step)
        self.report = report
        self.action = action
        self.scan = scan
        self.loss = loss


def step_with_closure(guard: GuardedSteps, closure: Closure, kwargs: dict[str, Any]) -> Any:
    """One guarded step of an optimizer that evaluates `closure`; returns what it returned, or the loss."""
    if not evaluates_once(guard.optimizer):
        return _Evaluations(guard, closure).step(kwargs)
    checked = 0 if guard._window is None else len(guard._window.weights)
    with torch.enable_grad():
        loss = closure()
    if not _was_dropped(guard, checked):  # else the loss goes with its micro-batch
        _observe(guard, loss)
    if guard._can_defer():  # the gradients are there, and the device may decide
        guard._launch(kwargs, None, None)
        return loss
    result = guard.host_step({**kwargs, "closure": lambda: loss})
    return loss if result is None else result


class _Evaluations:
    """The evaluations of one step that calls its closure several times, each of them scanned."""

    def __init__(self, guard: GuardedSteps, closure: Closure) -> None:
        self.guard = guard
        self.closure = closure
        self.ahead: list[Any] = []
        self.checks = 0
        self.report: StepReport | None = None  # of the first bad evaluation, if the step went on
        self.latest: tuple[EngineScan, Any, float] | None = None

    def step(self, kwargs: dict[str, Any]) -> Any:
        """The whole step."""
        inner, saved = self.guard.optimizer, None
        if self.guard._window is not None:
            raise RuntimeError(
                "check_microbatch can't be used with an optimizer that evaluates its closure several times: each of "
                "its evaluations is checked anyway"
            )
        try:
            if type(inner) is torch.optim.LBFGS:  # it begins with an evaluation: hooks run only if that is finite
                with torch.enable_grad():
                    self.ahead.append(self._evaluate())
            saved = Snapshot(inner)
            result = inner.step(self._next, **kwargs)
            if not self.checks:
                self._check(None)
            self._check_weights()
        except _Unwind as stop:
            if saved is not None:
                saved.restore()
            return self.guard.refuse(stop.report, stop.action, stop.scan, loss=stop.loss)
        except BaseException:
            if saved is not None:
                saved.restore()
            if self.report is not None:
                self.guard._steps = self.report.step  # it was no step
            raise
        report, scan = self._report()
        self.guard.finish(report, scan)
        return result

    def _next(self) -> Any:
        return self.ahead.pop() if self.ahead else self._evaluate()

    def _evaluate(self) -> Any:
        loss = self.closure()
        self._check(loss)
        return loss

    def _check(self, loss: Any) -> None:
        """Scan the gradients of one evaluation; clip them, repair them, or leave the step."""
        guard = self.guard
        self.checks += 1
        _observe(guard, loss)
        scan, labels = guard.scan()
        scan, labels, _ = guard.agreed(scan, labels)
        if scan.finite:
            if self.checks == 1 and guard.look_for_spike(scan) is not None and guard.policy.on_spike == "skip":
                report = guard.report(scan, labels, skipped=True, clip_factor=1.0, **guard.notes_on_limits())
                raise _Unwind(report, "skip", scan, loss)
            self.latest = (scan, labels, guard.scale_and_clip(scan))
            return
        report = self.report or guard.report(scan, labels, action="undecided", skipped=False, clip_factor=1.0)
        guard.look_for_origin(report)
        action = guard.decide(report)
        if action in ("skip", "raise"):
            raise _Unwind(report, action, scan, loss)
        factor = guard.repair(scan, 1.0, action)
        self.latest, self.report = (scan, labels, factor), report
        vars(report).update(action=action, clip_factor=factor)

    def _check_weights(self) -> None:
        """Such a step ends with an update that no evaluation has seen, and the way back is still there."""
        bad = self.guard.bad_parameters()
        if not bad:
            return
        report, scan = self._report()
        self.report = report
        vars(report)["parameters"] = bad
        action = self.guard.decide(report)
        if action != "warn":
            raise _Unwind(report, "raise" if action == "raise" else "skip", scan, None)
        vars(report)["action"] = action

    def _report(self) -> tuple[StepReport, EngineScan]:
        assert self.latest is not None  # a step has one check at least
        scan, labels, factor = self.latest
        if self.report is None:
            notes = self.guard.notes_on_limits()
            self.report = self.guard.report(scan, labels, clip_factor=factor, skipped=False, action="step", **notes)
        return self.report, scan


def _was_dropped(guard: GuardedSteps, checked: int) -> bool:
    """True if a micro-batch came after the first `checked` of the window, and the last was given up."""
    window = guard._window
    return window is not None and len(window.weights) > checked and window.last_was_dropped


def _observe(guard: GuardedSteps, loss: Any) -> None:
    if isinstance(loss, (torch.Tensor, Real)):
        guard.observe(loss if isinstance(loss, torch.Tensor) else float(loss))
