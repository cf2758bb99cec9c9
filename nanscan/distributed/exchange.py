"""The collectives of ranks that decide together: numbers and objects of each, errors that say what was shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanscan.distributed.brief import Brief
from nanscan.distributed.findings import FAILED, NOTHING, Finding, Findings

__all__ = ["CLAMPED", "GRADS", "LAYOUT", "PARAMETERS", "RECOVERY", "Exchange", "device_of"]

GRADS, CLAMPED, PARAMETERS, RECOVERY, LAYOUT = 1.0, 2.0, 3.0, 4.0, 5.0
_PHASES = {
    GRADS: "the gradients",
    CLAMPED: "the clamped gradients",
    PARAMETERS: "the parameters",
    RECOVERY: "the recovery",
    LAYOUT: "the optimized parameters (no observed loss)",
}
_PER_GUARD = 8.0  # what a guard's number adds to a phase
_ON_PURPOSE = "Ranks that step by themselves on purpose: nanscan.wrap(..., process_group=False)"


class Exchange:
    """What the ranks of a group tell each other: one small all_reduce, and more only where that can't say it all.

    Args:
        group: the `torch.distributed.ProcessGroup`.

    Attributes:
        number: which guarded optimizer of the group this is, in the order of their `wrap`: ranks that step two of
            them in different order notice.
        rank: this one's in the whole job.
        ranks: those of the group.
        world: the default group, which ends with `destroy_process_group`.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.number = 0
        self.world: Any = dist.group.WORLD
        self.rank = dist.get_rank()
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self._index = self.ranks.index(self.rank)
        self._device = device_of(group)
        self._brief = Brief(len(self.ranks), self._index)  # about the gradients of steps
        self._brief_of_others = Brief(len(self.ranks), self._index)

    def _phase(self, phase: float) -> float:
        return phase + _PER_GUARD * self.number

    def _blank(self, phase: float, step: int) -> Finding:
        return NOTHING._replace(phase=self._phase(phase), step=step)

    def _shared(self, own: Finding) -> Findings:
        """Every rank's finding, all of them about the same thing."""
        brief = self._brief if own.phase == self._phase(GRADS) else self._brief_of_others
        findings = brief.findings(own, self._sums(brief.numbers(own), own))
        if findings is None:
            findings = self._told_in_full(own)
            brief.told(own, findings)
        return findings

    def _sums(self, numbers: Any, own: Finding) -> Any:
        """Over all ranks."""
        sums = torch.from_numpy(numbers).to(self._device)
        self._run(lambda: dist.all_reduce(sums, group=self.group), f"the verdict on {_place(own)}")
        return sums.cpu().numpy()

    def _told_in_full(self, own: Finding) -> Findings:
        """Every rank's finding, after a look whether all of them are about the same thing."""
        findings = Findings(self._numbers(own, f"the verdict on {_place(own)}").cpu().numpy())
        if findings.are_about(own):
            return findings
        for finding, rank in zip(findings, self.ranks, strict=True):
            if finding.has(FAILED):
                raise RuntimeError(
                    f"nanscan: rank {rank} could not scan its gradients at step {int(finding.step)}; its own error "
                    "says why. The step was not taken on any rank"
                )
            if finding[:2] != own[:2]:
                raise RuntimeError(
                    f"nanscan: the ranks are not at the same place: rank {self.rank} shares {_place(own)}, rank {rank} "
                    f"{_place(finding)}. Every rank must call optimizer.step() equally often, observe() where others "
                    f"do and, with several guarded optimizers, in the same order, with the same options. {_ON_PURPOSE}"
                )
        return findings

    def _numbers(self, own: Any, what: str) -> Tensor:
        """The (nested) numbers of every rank, by rank; the shape is the same on each."""
        mine = torch.tensor(own, dtype=torch.float64, device=self._device)
        every = mine.new_empty((len(self.ranks), *mine.shape))
        self._run(lambda: dist.all_gather(list(every.unbind()), mine, group=self.group), what)
        return every

    def _objects(self, own: Any, what: str) -> list[Any]:
        """What every rank gives, by rank."""
        every: list[Any] = [None] * len(self.ranks)
        self._run(lambda: dist.all_gather_object(every, own, group=self.group), what)
        return every

    def _run(self, collective: Callable[[], Any], what: str) -> None:
        if self.world is not dist.group.WORLD:
            raise RuntimeError(
                f"nanscan: {what} can't be shared between the ranks {self.ranks}: their process group was ended by "
                "destroy_process_group(). After a new init_process_group(), make the model's DDP or fully_shard anew "
                "and call nanscan.wrap(optimizer, model) again, which takes the present group"
            )
        try:
            collective()
        except RuntimeError as error:
            raise RuntimeError(
                f"nanscan: {what} could not be shared between the ranks {self.ranks}: {error}. Every rank must call "
                "optimizer.step() equally often; one that skips the call, waits elsewhere or has died makes the others "
                f"wait until the group's timeout. {_ON_PURPOSE}"
            ) from error


def device_of(group: Any) -> torch.device:
    """Where the group's collectives take place: the CPU if they can."""
    kinds = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def _place(finding: Finding) -> str:
    number, phase = divmod(finding.phase, _PER_GUARD)
    which = f" of guarded optimizer {int(number) + 1}" if number else ""
    return f"{_PHASES.get(phase, 'something else')} of step {int(finding.step)}{which}"
