"""The verdict on a step: what this process found, or with a process group what all of its ranks found together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanscan import engine
from nanscan.checks import bad_buffers, bad_parameters, dense_bad_rows, sparse_places
from nanscan.distributed import Agreement
from nanscan.distributed.agreed import AgreedScan
from nanscan.distributed.gradients import local_grads, local_groups
from nanscan.engine.result import BadInput, EngineScan
from nanscan.engine.shards import dtensor_type
from nanscan.engine.tensors import flat_params
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
    _sharded: bool = False  # some parameters are DTensors
    _group_given: Any = None  # as in `wrap`
    _alone_said: bool = False  # see `note_alone`
    _agreement: Agreement | None  # with the other ranks of a process group; None: this process is alone

    def agreed(
        self, scan: EngineScan, labels: Sequence[Label], flagged: bool = False
    ) -> tuple[EngineScan, Sequence[Label], bool]:
        """The scan, its labels and whether a gradient scaler found an Inf: on any rank."""
        groups = self.optimizer.param_groups
        if self._agreement is None:
            return scan, labels, flagged
        known = self._names.refresh(self._names.signature, groups)
        no_loss = len(labels) == self._params()  # a loss is each rank's own
        if not self._agreement.silent:
            self._agreement.look_at_hooks()
        if self._agreement.equal_gradients and no_loss and not self._agreement.silent:
            self._agreement.compare(flat_params(groups), known, self._steps)
            self._replan()
        if self._agreement.silent and no_loss:
            return scan, labels, flagged
        bad = [] if scan.finite else dense_bad_rows(scan, labels, groups)
        return self._agreement.scan(scan, bad, labels, flat_params(groups), known, self._steps, flagged)

    def decide(self, report: StepReport) -> Action:
        """What to do about a bad step; a function given as `on_nonfinite` decides on one rank for all."""
        if self._agreement is None or not callable(self.policy.on_nonfinite):
            return self.policy.decide(report)
        return self._agreement.decided(lambda: self.policy.decide(report))

    def origin_of_all(self, found: Any) -> Any:
        """The `Origin` that the first rank with one has found; every rank asks at each bad step with find_origin."""
        return found if self._agreement is None else self._agreement.origin(found)

    def bad_parameters(self) -> tuple[TensorReport, ...]:
        """The parameters that hold a NaN or Inf, with their state: on any rank."""
        bad = bad_parameters(self.optimizer, self._names)
        if self._agreement is None:
            return bad
        return self._agreement.parameters(bad, self._steps)

    def _bad_buffers(self) -> tuple[TensorReport, ...]:
        """The model's bad buffers on this rank: a batch norm's statistics are each rank's own."""
        return self._of_this_rank(bad_buffers(self._names.model))

    def _bad_weights(self) -> tuple[TensorReport, ...]:
        """What of this rank's parameters and their state is bad already when a step is refused."""
        try:
            return self._of_this_rank(bad_parameters(self.optimizer, self._names))
        except BadInput:  # parameters that only their own operators can read
            return ()

    def _of_this_rank(self, rows: tuple[TensorReport, ...]) -> tuple[TensorReport, ...]:
        return rows if self._agreement is None else tuple(replace(row, rank=self._agreement.rank) for row in rows)

    def _places(self, scan: EngineScan) -> dict[int, tuple[int, ...]] | None:
        """Where the bad elements of sparse gradients stand; the rows of several ranks say it themselves."""
        if scan.finite or isinstance(scan, AgreedScan):
            return None
        return sparse_places(scan, self.optimizer.param_groups)

    def _clamped_norm(self) -> float:
        """The norm of the gradients as they are now, all finite or not: the same on every rank."""
        scan = self._scanned([])
        agreement = self._agreement
        if agreement is None or agreement.equal_gradients:
            return scan.finite_norm
        return agreement.total_norm(scan, self._steps)

    def _agree_over(self, process_group: Any) -> None:
        raise NotImplementedError

    def _replan(self) -> None:
        raise NotImplementedError

    def notice_shards(self) -> bool:
        """Whether parameters have become DTensors since `wrap`, as trainers do it: all ranks decide from now on."""
        kind = dtensor_type()
        if (
            self._sharded
            or kind == ()
            or not any(isinstance(p, kind) for p in flat_params(self.optimizer.param_groups))
        ):
            return False
        self._agree_over(self._group_given)
        return True

    def _scanned(self, losses: Sequence[Tensor]) -> EngineScan:
        """The scan of this rank's gradients, of sharded parameters of its shards."""
        groups = self.optimizer.param_groups
        if self._sharded or self.notice_shards():
            return engine.scan(local_grads(flat_params(groups)), losses)
        return engine.scan_grads(groups, losses)

    def _grad_groups(self) -> list[dict[str, Any]]:
        """The parameter groups for what changes gradients in place."""
        groups = self.optimizer.param_groups
        return local_groups(flat_params(groups)) if self._sharded else groups

    def _zero_nonfinite(self) -> None:
        groups = self.optimizer.param_groups
        if self._agreement is not None and not self._agreement.equal_gradients:
            self._agreement.zero_nonfinite_grads_(flat_params(groups))
        engine.zero_nonfinite_grads_(self._grad_groups())

    def _clear_grads(self) -> None:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    def _params(self) -> int:
        return sum(len(group["params"]) for group in self.optimizer.param_groups)
