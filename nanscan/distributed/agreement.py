"""One verdict for all ranks of a process group: before anyone acts, each hears what the others found."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanscan.distributed.agreed import AgreedScan, Finding, RankRow
from nanscan.engine.result import EngineScan, Row
from nanscan.engine.tensors import may_overlap
from nanscan.names import Joined
from nanscan.policy import ACTIONS, Action
from nanscan.report import Label, TensorReport, unravel

__all__ = ["Agreement"]

_GRADS, _CLAMPED, _PARAMETERS, _RECOVERY = 1.0, 2.0, 3.0, 4.0
_PHASES = {
    _GRADS: "the gradients",
    _CLAMPED: "the clamped gradients",
    _PARAMETERS: "the parameters",
    _RECOVERY: "the recovery",
}
_FAILED = -1


class Agreement:
    """Shares what a step found with the ranks of a group: one small all_gather each time.

    Args:
        group: the `torch.distributed.ProcessGroup`.
        equal_gradients: True where every rank holds the same gradients anyway: what they say needs no collective.
    """

    def __init__(self, group: Any, equal_gradients: bool = False) -> None:
        self.group = group
        self.equal_gradients = equal_gradients
        self.rank = dist.get_rank()
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self._device = _device_of(group)

    # ---- the verdict of a step ---------------------------------------------------------------------------------------

    def scan(
        self, own: EngineScan, bad: Sequence[Row], labels: Sequence[Label], params: int, step: int, flagged: bool
    ) -> tuple[AgreedScan, Sequence[Label], bool]:
        """The scan with the totals of all ranks, its labels, and whether any rank's gradient scaler found an Inf.

        Args:
            own: this rank's.
            bad: its bad rows, with indices in the dense shape.
            labels: what was scanned: the gradients, then the losses.
            params: how many of `labels` are gradients.
            step: index of the step.
            flagged: whether this rank's gradient scaler found an Inf.
        """
        findings = self._shared(_finding(_GRADS, step, params, own, bad, labels, flagged))
        rows, losses = [], []
        for finding, rank in zip(findings, self.ranks, strict=True):
            if not finding.bad_tensors or rank == self.rank:
                continue
            position = int(finding.position)
            if position >= params:  # a loss: another rank may have observed fewer, or one of another shape
                losses.append(_loss_label(finding, params))
                position = len(labels) + len(losses) - 1
            elif math.prod(labels[position].shape) != finding.bad_numel:
                raise RuntimeError(_not_the_same_model(f"'{labels[position].names[0]}' has another size", rank))
            rows.append(_row(finding, position, rank))
        scan = AgreedScan(own, bad, rows, findings, self.rank)
        return scan, Joined(labels, losses) if losses else labels, any(f.flagged for f in findings)

    def norm(self, norm: float, params: int, step: int) -> float:
        """The largest norm of any rank."""
        blank = Finding(*[0.0] * len(Finding._fields))
        own = blank._replace(phase=_CLAMPED, step=step, params=params, finite_norm=norm)
        return max(finding.finite_norm for finding in self._shared(own))

    def give_up(self, params: int, step: int) -> None:
        """Tell the others that this rank can't scan its gradients and is about to raise: they must not wait for it."""
        blank = Finding(*[0.0] * len(Finding._fields))
        with contextlib.suppress(RuntimeError):  # what is about to be raised says more
            self._gathered(blank._replace(phase=_GRADS, step=step, params=params, failed=1.0))

    def parameters(self, own: tuple[TensorReport, ...], labels: Sequence[Label], step: int) -> tuple[TensorReport, ...]:
        """The bad parameters (with their state) of this rank, and of every other rank the first one."""
        blank = Finding(*[0.0] * len(Finding._fields))
        mine = blank._replace(phase=_PARAMETERS, step=step, params=len(labels))
        if own:
            names = [label.names[0] for label in labels]
            first = own[0]
            mine = mine._replace(
                bad_tensors=len(own),
                position=names.index(first.name.split(" (= ")[0]),
                place=_flat(first.first_bad, first.shape),
                bad_nan=first.nan_count,
                bad_inf=first.inf_count,
                bad_inf_norm=first.inf_norm,
            )
        findings = self._shared(mine)
        found = [replace(row, rank=self.rank) for row in own]
        for finding, rank in zip(findings, self.ranks, strict=True):
            if finding.bad_tensors and rank != self.rank:
                found.append(_parameter_row(finding, labels[int(finding.position)], rank))
        return tuple(sorted(found, key=lambda row: row.rank or 0))

    def in_trouble(self, trouble: bool, due: bool, step: int) -> tuple[int | None, bool]:
        """The first rank that has to go back, None if none has; and whether a snapshot is due on any.

        Args:
            trouble: whether this rank has to go back.
            due: whether a snapshot is due here.
            step: of the recovery, which must be the same on every rank.
        """
        blank = Finding(*[0.0] * len(Finding._fields))
        findings = self._shared(blank._replace(phase=_RECOVERY, step=step, flagged=trouble, losses=due))
        first = next((rank for finding, rank in zip(findings, self.ranks, strict=True) if finding.flagged), None)
        return first, any(finding.losses for finding in findings)

    def decided(self, decide: Callable[[], Action]) -> Action:
        """What the group's first rank decides; the others follow. Called on bad steps only, by all ranks."""
        code, error = _FAILED, None
        if self.rank == self.ranks[0]:
            try:
                code = ACTIONS.index(decide())
            except Exception as problem:
                error = problem
        told = torch.tensor([code], dtype=torch.int64, device=self._device)
        self._run(lambda: dist.broadcast(told, self.ranks[0], group=self.group), "the decision on a bad step")
        if error is not None:
            raise error
        if int(told) == _FAILED:
            raise RuntimeError(
                f"nanscan: the function given as on_nonfinite failed on rank {self.ranks[0]}, which decides for all "
                "ranks; its own error says why. The step was not taken on any rank"
            )
        return ACTIONS[int(told)]  # type: ignore[return-value]

    @torch.no_grad()
    def zero_nonfinite_grads_(self, params: Sequence[Tensor]) -> None:
        """Set to 0 on every rank what is NaN or Inf on any, so that the gradients stay the same; dense ones only."""
        masks = [_bad_elements(p) for p in params]
        bad = torch.tensor([bool(mask.any()) for mask in masks], dtype=torch.uint8, device=self._device)
        self._run(lambda: dist.all_reduce(bad, dist.ReduceOp.MAX, group=self.group), "which gradients to repair")
        for param, mask, is_bad in zip(params, masks, bad.tolist(), strict=True):
            if not is_bad:
                continue
            shared = mask.to(self._device, torch.uint8)
            self._run(
                lambda shared=shared: dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group),  # type: ignore[misc]
                "which elements to repair",
            )
            if param.grad is not None:
                _zero_where(param, shared.bool().to(param.device))

    # ---- the collective ----------------------------------------------------------------------------------------------

    def _shared(self, own: Finding) -> list[Finding]:
        """Every rank's finding, after a look whether all of them are about the same thing."""
        findings = self._gathered(own)
        for finding, rank in zip(findings, self.ranks, strict=True):
            if finding.failed:
                raise RuntimeError(
                    f"nanscan: rank {rank} could not scan its gradients at step {int(finding.step)}; its own error "
                    "says why. The step was not taken on any rank"
                )
            if finding[:2] != own[:2]:
                raise RuntimeError(
                    f"nanscan: the ranks are not at the same place: rank {self.rank} shares {_place(own)}, rank {rank} "
                    f"{_place(finding)}. Every rank must call optimizer.step() equally often, with the same options"
                )
            if finding.params != own.params:
                counts = f"the optimizer has {int(own.params)} parameters on rank {self.rank}, {int(finding.params)}"
                raise RuntimeError(_not_the_same_model(counts, rank))
        return findings

    def _gathered(self, own: Finding) -> list[Finding]:
        mine = torch.tensor(own, dtype=torch.float64, device=self._device)
        every = torch.empty(len(self.ranks), len(own), dtype=torch.float64, device=self._device)
        what = f"the verdict on {_place(own)}"
        self._run(lambda: dist.all_gather(list(every.unbind()), mine, group=self.group), what)
        return [Finding(*numbers) for numbers in every.tolist()]

    def _run(self, collective: Callable[[], Any], what: str) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise RuntimeError(
                f"nanscan: {what} could not be shared between the ranks {self.ranks}: {error}. Every rank must call "
                "optimizer.step() equally often; one that skips the call, waits elsewhere or has died makes the others "
                "wait until the group's timeout"
            ) from error


def _device_of(group: Any) -> torch.device:
    """Where the group's collectives take place: the CPU if they can."""
    kinds = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def _finding(
    phase: float,
    step: int,
    params: int,
    own: EngineScan,
    bad: Sequence[Row],
    labels: Sequence[Label],
    flagged: bool,
) -> Finding:
    first = bad[0] if bad else Row(-1, (), 0.0, 0.0, 0, 0, -1)
    numel = math.prod(labels[first.position].shape) if bad else 0
    totals = (own.nan_count, own.inf_count, len(bad))
    place = (first.position, first.first_bad, numel, first.nan_count, first.inf_count, first.inf_norm)
    norms = (own.norm, own.finite_norm, own.inf_norm)
    counts = (params, len(labels) - params)
    return Finding(phase, step, False, flagged, *counts, *totals, *place, *norms, own.numel)


def _row(finding: Finding, position: int, rank: int) -> RankRow:
    counts = (int(finding.bad_nan), int(finding.bad_inf))
    return RankRow(position, (), math.nan, finding.bad_inf_norm, *counts, int(finding.place), rank)


def _loss_label(finding: Finding, params: int) -> Label:
    number, numel = int(finding.position) - params, int(finding.bad_numel)
    names = ("loss" if finding.losses == 1 else f"loss[{number}]",)
    return Label(names, () if numel == 1 else (numel,), "unknown", "unknown", "loss")


def _not_the_same_model(what: str, rank: int) -> str:
    return f"nanscan: {what} on rank {rank}; process_group= is for the same model on every rank"


def _place(finding: Finding) -> str:
    return f"{_PHASES.get(finding.phase, 'something else')} of step {int(finding.step)}"


def _flat(index: tuple[int, ...] | None, shape: tuple[int, ...]) -> int:
    flat = 0
    for at, size in zip(index or (), shape, strict=bool(index)):
        flat = flat * size + at
    return flat


def _parameter_row(finding: Finding, label: Label, rank: int) -> TensorReport:
    norm = math.nan if finding.bad_nan else math.inf
    counts = (int(finding.bad_nan), int(finding.bad_inf))
    place = unravel(int(finding.place), label.shape)
    return TensorReport(
        label.names[0],
        label.shape,
        label.dtype,
        label.device,
        norm,
        finding.bad_inf_norm,
        *counts,
        place,
        rank,
        "parameter",
    )


def _bad_elements(param: Tensor) -> Tensor:
    grad = param.grad
    if grad is None or grad.layout is not torch.strided:
        return torch.zeros(param.shape, dtype=torch.bool, device=param.device)
    return ~torch.isfinite(grad)


def _zero_where(param: Tensor, mask: Tensor) -> None:
    grad = param.grad
    if grad is None or grad.layout is not torch.strided:
        return
    if may_overlap(grad):
        param.grad = grad.masked_fill(mask, 0.0)
    else:
        grad.masked_fill_(mask, 0.0)
