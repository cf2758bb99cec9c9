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

from nanscan.distributed.agreed import AgreedScan, RankRow, merged, total_norm
from nanscan.distributed.exchange import CLAMPED, GRADS, LAYOUT, PARAMETERS, RECOVERY, Exchange
from nanscan.distributed.findings import DUE, FAILED, FLAGGED, HAS_INF, HAS_NAN, BadTensor, Finding, Findings
from nanscan.distributed.holdings import Holding, Own, Plan, first_plan, plan_of_meshes, plan_of_tables, same_values
from nanscan.distributed.repair import zero_shared
from nanscan.engine.result import EngineScan, Row
from nanscan.engine.shards import is_dtensor, local_of
from nanscan.names import Joined
from nanscan.origin.loss import is_beside
from nanscan.policy import ACTIONS, Action
from nanscan.report import Label, TensorReport

__all__ = ["Agreement"]

_FAILED = -1
_MOST_ROWS = 1000  # bad tensors that one rank tells the others
_LOSS = -2  # the position of the first loss, then downwards
_DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")


class Agreement(Exchange):
    """Shares what a step found with the ranks of a group: one small all_reduce on a good step.

    Args:
        group: the `torch.distributed.ProcessGroup`.
        equal_gradients: True where every rank holds the same gradients anyway: what they say needs no collective.
        reducers: the DDP modules that make them so.

    Attributes:
        silent: True if a step whose gradients alone are judged needs no word: they are equal, and the ranks were found
            to optimize the same parameters.
    """

    def __init__(self, group: Any, equal_gradients: bool = False, reducers: Sequence[Any] = ()) -> None:
        super().__init__(group)
        self.equal_gradients = equal_gradients
        self._reducers = reducers
        self.silent = False
        self._own: Own | None = None
        self._labels: Sequence[Label] | None = None
        self._plan: Plan | None = None
        self._known: bytes | None = None  # what each rank holds, as the plan takes it

    # ---- the verdict of a step ---------------------------------------------------------------------------------------

    def scan(
        self,
        own: EngineScan,
        bad: Sequence[Row],
        labels: Sequence[Label],
        params: Sequence[Tensor],
        known: Sequence[Label],
        step: int,
        flagged: bool,
    ) -> tuple[AgreedScan, Sequence[Label], bool]:
        """The scan with the totals of all ranks, its labels, and whether any rank's gradient scaler found an Inf.

        Args:
            own: this rank's.
            bad: its bad rows, with indices in the whole tensors.
            labels: what was scanned: the gradients, then the losses.
            params: the parameters.
            known: the labels of their gradients; the same list as long as they are the same.
            step: index of the step.
            flagged: whether this rank's gradient scaler found an Inf.
        """
        self._look(params, known)
        told = [_told(row, labels, len(params)) for row in bad]
        findings = self._counted(lambda: self._finding(own, told, len(labels) - len(params), step, flagged))
        any_flag = bool(findings.flags & FLAGGED)
        places = {row.position: row.first_bad for row in bad}
        assert self._plan is not None
        if not findings.column("bad_tensors").any():
            return AgreedScan(own, places, (), (0, 0), findings, self._plan, self.rank), labels, any_flag
        found = self._bad_tensors(findings, told)
        rows, every, repeated = self._rows(found, labels, findings)
        return AgreedScan(own, places, rows, repeated, findings, self._plan, self.rank), every, any_flag

    def look_at_hooks(self) -> None:
        """Count on different gradients where there is a communication hook: it may reduce otherwise, or not at all."""
        if any(getattr(module, "_comm_hooks", ()) for module in self._reducers):
            self.equal_gradients = False

    def compare(self, params: Sequence[Tensor], known: Sequence[Label], step: int) -> None:
        """At the first step, where gradients are equal: do all ranks optimize the same parameters? Else they share."""
        self._look(params, known)
        assert self._own is not None
        layouts = self._shared(self._blank(LAYOUT, step)._replace(layout=self._own.layout))
        self.silent = self.equal_gradients = len({finding.layout for finding in layouts}) == 1

    def norm(self, norm: float, params: int, step: int) -> float:
        """The largest of a number over the ranks."""
        own = self._blank(CLAMPED, step)._replace(finite_norm=norm)
        return float(self._shared(own).column("finite_norm").max())

    def total_norm(self, scan: EngineScan, step: int) -> float:
        """The norm over all ranks of gradients that were changed since `scan` was agreed on, all finite or not."""
        assert self._plan is not None
        own = self._blank(CLAMPED, step)._replace(finite_norm=_counted(scan, self._plan))
        return total_norm(self._shared(own), self._plan)

    def give_up(self, params: int, step: int) -> None:
        """Tell the others that this rank can't scan its gradients and is about to raise: they must not wait for it."""
        with contextlib.suppress(RuntimeError):  # what is about to be raised says more
            self._shared(self._blank(GRADS, step)._replace(flags=FAILED))

    def parameters(self, own: tuple[TensorReport, ...], step: int) -> tuple[TensorReport, ...]:
        """The bad parameters (with their state) of all ranks; what several say alike is said once."""
        mine = self._blank(PARAMETERS, step)._replace(bad_tensors=len(own))
        if not any(finding.bad_tensors for finding in self._shared(mine)):
            return ()
        told: list[list[TensorReport]] = self._objects(list(own), "the bad parameters")
        alike = {repr(row): sum(row in rows for rows in told) for rows in told for row in rows}
        found: dict[str, TensorReport] = {}
        for rank, rows in zip(self.ranks, told, strict=True):
            for row in rows:
                everywhere = alike[repr(row)] == len(self.ranks) > 1
                found.setdefault(
                    repr(row) if everywhere else f"{rank} {row}", replace(row, rank=None if everywhere else rank)
                )
        return tuple(found.values())

    def in_trouble(self, trouble: bool, due: bool, step: int) -> tuple[int | None, bool]:
        """The first rank that has to go back, None if none has; and whether a snapshot is due on any.

        Args:
            trouble: whether this rank has to go back.
            due: whether a snapshot is due here.
            step: of the recovery, which must be the same on every rank.
        """
        findings = self._shared(self._blank(RECOVERY, step)._replace(flags=FLAGGED * trouble + DUE * due))
        if not findings.flags:
            return None, False
        in_trouble = (rank for finding, rank in zip(findings, self.ranks, strict=True) if finding.has(FLAGGED))
        return next(in_trouble, None), bool(findings.flags & DUE)

    def origin(self, found: Any) -> Any:
        """The `Origin` of the first rank that has one, with a note which rank that is; None if none has.

        A rank that sees no more than a bad gradient, which a reduction brings from others, comes last.
        """
        origins = zip(self.ranks, self._objects(found, "where the NaN or Inf was made"), strict=True)
        known = sorted(((r, o) for r, o in origins if o is not None), key=lambda each: is_beside(each[1]))
        if not known:
            return None
        rank, origin = known[0]
        note = f"found on rank {rank}"
        return replace(origin, note=note if origin.note is None else f"{origin.note}; {note}")

    def decided(self, decide: Callable[[], Action]) -> Action:
        """What the group's first rank decides; the others follow. Called on bad steps only, by all ranks."""
        code, error = _FAILED, None  # type: int, BaseException | None
        if self.rank == self.ranks[0]:
            try:
                code = ACTIONS.index(decide())
            except BaseException as problem:  # an interrupt too: the others are waiting
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

    def zero_nonfinite_grads_(self, params: Sequence[Tensor]) -> None:
        """Set to 0 on every holder what is NaN or Inf on any, so that replicas stay the same; dense gradients only."""
        assert self._plan is not None
        plan, index = self._plan, self._index
        shared = {plan.part(index, at): p for at, p in enumerate(params) if plan.holders(index, at) > 1}
        zero_shared(shared, lambda masks: self._objects(masks, "which elements to repair"))

    # ---- who holds what ----------------------------------------------------------------------------------------------

    def _look(self, params: Sequence[Tensor], labels: Sequence[Label]) -> None:
        """Note what this rank holds, where that has changed."""
        if labels is not self._labels:
            self._own, self._labels = Own(params, labels, self.ranks), labels
            self._plan = first_plan(self._own, self.ranks, self.rank)

    def _counted(self, finding: Callable[[], Finding]) -> Findings:
        """Every rank's finding, with norms that count each element once."""
        findings = self._shared(finding())
        if findings.held == self._known:
            return findings
        assert self._own is not None
        first, self._known = self._known is None, findings.held
        held = [(each.layout, each.sketch) for each in findings]
        alike = all(layout == held[0][0] and same_values(sketch, held[0][1]) for layout, sketch in held)
        if alike and self._own.regular:
            self._plan = plan_of_meshes(self._own, self.ranks, self.rank)
            return findings if first else self._shared(finding())
        tables: list[list[Holding]] = self._objects(self._own.table(), "what each rank holds")
        self._plan = plan_of_tables(tables, self._index)
        return self._shared(finding())

    # ---- what was found ----------------------------------------------------------------------------------------------

    def _finding(self, scan: EngineScan, bad: Sequence[BadTensor], losses: int, step: int, flagged: bool) -> Finding:
        assert self._own is not None and self._plan is not None
        norm = scan.norm
        flags = FLAGGED * flagged + HAS_NAN * math.isnan(norm) + HAS_INF * math.isinf(norm)
        first = bad[0] if bad else BadTensor(-1.0, -1.0, 0, 0, 0, 0, 0)
        return Finding(
            self._phase(GRADS),
            step,
            flags,
            self._own.layout,
            self._own.sketch,
            losses,
            scan.nan_count,
            scan.inf_count,
            len(bad),
            _counted(scan, self._plan),
            scan.inf_norm,
            _counted_numel(scan, self._plan, self._own),
            *first,
        )

    def _bad_tensors(self, findings: Findings, told: Sequence[BadTensor]) -> list[tuple[int, BadTensor]]:
        """(index of the rank, bad tensor) of all ranks; one more collective where a rank has several."""
        most = int(findings.column("bad_tensors").max())
        if most <= 1:
            return [(index, finding.first) for index, finding in enumerate(findings) if finding.bad_tensors]
        most = min(most, _MOST_ROWS)
        blank = BadTensor(-1.0, *[0.0] * 6)
        mine = [*told, *[blank] * most][:most]
        tables = self._numbers([list(row) for row in mine], "the bad tensors of this step").tolist()
        rows = [(index, BadTensor(*row)) for index, table in enumerate(tables) for row in table]
        return [(index, bad) for index, bad in rows if bad.position != -1]

    def _rows(
        self, found: Sequence[tuple[int, BadTensor]], labels: Sequence[Label], findings: Sequence[Finding]
    ) -> tuple[list[RankRow], Sequence[Label], tuple[int, int]]:
        """The rows of a report, the labels they point to, and (NaN, Inf) that replicas repeated."""
        assert self._plan is not None and self._own is not None
        extra: list[Label] = []
        rows = []
        kept = merged(found, self._plan)
        for index, bad, everywhere in kept:
            losses = int(findings[index].losses)
            label = (
                self._plan.label(index, int(bad.position)) if bad.position >= 0 else _loss_label(bad, losses, labels)
            )
            position = self._position(index, bad, label)
            if position is None:
                extra.append(label)
                position = len(labels) + len(extra) - 1
            counts = (int(bad.nan_count), int(bad.inf_count))
            rank = None if everywhere else self.ranks[index]
            rows.append(RankRow(position, (), math.nan, bad.inf_norm, *counts, int(bad.place), rank))
        nans = sum(bad.nan_count for _, bad in found) - sum(bad.nan_count for _, bad, _ in kept)
        infs = sum(bad.inf_count for _, bad in found) - sum(bad.inf_count for _, bad, _ in kept)
        return rows, Joined(labels, extra), (int(nans), int(infs))

    def _position(self, index: int, bad: BadTensor, label: Label) -> int | None:
        """Where the label of a bad tensor stands among this rank's; None if it is not one of them."""
        assert self._own is not None
        if bad.position < 0:
            return len(self._own.labels) + _LOSS - int(bad.position) if index == self._index else None
        own = self._own.labels
        position = int(bad.position)
        return position if index == self._index or (position < len(own) and own[position] is label) else None


def _counted(scan: EngineScan, plan: Plan) -> float:
    """The norm of the finite elements that count on this rank."""
    if plan.all_counted:
        return scan.finite_norm
    count = plan.counted
    return math.hypot(*[row[2] for row in scan.rows() if row[0] < len(count) and count[row[0]]])


def _counted_numel(scan: EngineScan, plan: Plan, own: Own) -> int:
    if plan.all_counted:
        return scan.numel
    elsewhere = [row[0] for row in scan.rows() if row[0] < len(plan.counted) and not plan.counted[row[0]]]
    return scan.numel - sum(local_of(p).numel() if is_dtensor(p := own.params[at]) else p.numel() for at in elsewhere)


def _told(row: Row, labels: Sequence[Label], params: int) -> BadTensor:
    """A bad row as the other ranks are told of it."""
    position, numel, dtype = row.position, 0, 0
    if position >= params:
        label = labels[position]
        position, numel = _LOSS - (position - params), math.prod(label.shape)
        dtype = _DTYPES.index(label.dtype) if label.dtype in _DTYPES else len(_DTYPES)
    return BadTensor(position, row.first_bad, row.nan_count, row.inf_count, row.inf_norm, numel, dtype)


def _loss_label(bad: BadTensor, losses: int, labels: Sequence[Label]) -> Label:
    number, numel = _LOSS - int(bad.position), int(bad.numel)
    names = ("loss" if losses == 1 else f"loss[{number}]",)
    dtype = (*_DTYPES, "unknown")[int(bad.dtype)]
    return Label(names, () if numel == 1 else (numel,), dtype, labels[0].device if labels else "unknown", "loss")
