"""The verdict on a step: what this process found, or with a process group what all of its ranks found together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from nanscan import engine
from nanscan.checks import bad_buffers, bad_parameters, dense_bad_rows, sparse_places
from nanscan.distributed import Agreement
from nanscan.engine.result import EngineScan
from nanscan.names import Names
from nanscan.policy import Action, Policy
from nanscan.report import Label, StepReport, TensorReport

__all__ = ["Verdict"]


class Verdict(torch.optim.Optimizer):
    """The questions of a guarded step that other ranks may have a say in."""

    optimizer: torch.optim.Optimizer
    policy: Policy
    _names: Names
    _steps: int
    _agreement: Agreement | None  # with the other ranks of a process group; None: this process is alone

    def agreed(
        self, scan: EngineScan, labels: Sequence[Label], flagged: bool = False
    ) -> tuple[EngineScan, Sequence[Label], bool]:
        """The scan, its labels and whether a gradient scaler found an Inf: on any rank."""
        if self._agreement is None:
            return scan, labels, flagged
        bad = [] if scan.finite else dense_bad_rows(scan, labels, self.optimizer.param_groups)
        return self._agreement.scan(scan, bad, labels, self._params(), self._steps, flagged)

    def decide(self, report: StepReport) -> Action:
        """What to do about a bad step; a function given as `on_nonfinite` decides on one rank for all."""
        if self._agreement is None or not callable(self.policy.on_nonfinite):
            return self.policy.decide(report)
        return self._agreement.decided(lambda: self.policy.decide(report))

    def bad_parameters(self) -> tuple[TensorReport, ...]:
        """The parameters that hold a NaN or Inf, with their state: on any rank."""
        bad = bad_parameters(self.optimizer, self._names)
        if self._agreement is None:
            return bad
        return self._agreement.parameters(bad, self._names.refresh(0, self.optimizer.param_groups), self._steps)

    def _bad_buffers(self) -> tuple[TensorReport, ...]:
        """The model's bad buffers on this rank: a batch norm's statistics are each rank's own."""
        bad = bad_buffers(self._names.model)
        return bad if self._agreement is None else tuple(replace(row, rank=self._agreement.rank) for row in bad)

    def _places(self, scan: EngineScan) -> dict[int, tuple[int, ...]] | None:
        """Where the bad elements of sparse gradients stand; the rows of several ranks say it themselves."""
        if scan.finite or self._agreement is not None:
            return None
        return sparse_places(scan, self.optimizer.param_groups)

    def _clamped_norm(self) -> float:
        """The norm of the gradients as they are now, all finite or not: the same on every rank."""
        norm = engine.scan_grads(self.optimizer.param_groups).finite_norm
        return norm if self._agreement is None else self._agreement.norm(norm, self._params(), self._steps)

    def _zero_nonfinite(self) -> None:
        groups = self.optimizer.param_groups
        if self._agreement is not None:
            self._agreement.zero_nonfinite_grads_([p for group in groups for p in group["params"]])
        engine.zero_nonfinite_grads_(groups)

    def _params(self) -> int:
        return sum(len(group["params"]) for group in self.optimizer.param_groups)
