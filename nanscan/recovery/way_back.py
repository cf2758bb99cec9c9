"""The way back: the best copy is put back, the learning rate lowered, the rollback recorded, or the run given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from nanscan import messages
from nanscan.distributed.alone import note_alone
from nanscan.errors import NonFiniteWarning, TrainingDiverged
from nanscan.guard import GuardedOptimizer
from nanscan.manager import CheckpointManager
from nanscan.recovery.arguments import Options
from nanscan.recovery.learning_rate import learning_rates, scale_learning_rates
from nanscan.recovery.memory import Memory, Moment
from nanscan.recovery.record import Rollback, Trouble, full_report
from nanscan.recovery.training_state import TrainingState
from nanscan.report import Report, TensorReport
from nanscan.reporting.notes import note_rollback
from nanscan.snapshot import nested_optimizers

__all__ = ["Return", "WayBack"]


class Return(NamedTuple):
    """What was put back: when it was taken, where it came from, and the learning rates before."""

    moment: Moment
    source: str
    lr_before: tuple[float, ...]


class WayBack:
    """Goes back, as often as is allowed.

    Args:
        state: the live objects.
        memory: the copies of it.
        guard: the guarded optimizer, whose run of skips ends here; or None.
        manager: where to look if no copy in memory is intact; or None.
        parts: of the training, as `manager.restore` takes them.
        options: of the recovery.

    Attributes:
        rollbacks: every one so far, oldest first.
        given_up: the exception that ended the run; None as long as it goes on.
    """

    def __init__(
        self,
        state: TrainingState,
        memory: Memory,
        guard: GuardedOptimizer | None,
        manager: CheckpointManager | None,
        parts: dict[str, Any],
        options: Options,
    ) -> None:
        self._state = state
        self._memory = memory
        self._guard = guard
        self._manager = manager
        self._parts = parts
        self._options = options
        self.rollbacks: list[Rollback] = []
        self.given_up: TrainingDiverged | None = None

    def restore(self, trouble: Trouble, anywhere: Callable[[bool], bool] = bool) -> Return:
        """Put the best copy back.

        Args:
            trouble: why.
            anywhere: as for `Memory.choose`.

        Raises:
            TrainingDiverged: there is none.
        """
        before = learning_rates(self._state.optimizer)
        if self._guard is not None:
            self._guard.start_over()
        saved = self._memory.choose(anywhere)
        if saved is None:
            return self._restore_from_disk(trouble, before)
        saved.failures += 1
        self._state.restore(saved.content, saved.devices)
        return Return(saved.moment, "memory", before)

    def finish(self, trouble: Trouble, at: int, back: Return) -> None:
        """Lower the learning rate and record the rollback.

        Raises:
            TrainingDiverged: it was one more than `max_rollbacks`.
        """
        gives_up = len(self.rollbacks) >= self._options.max_rollbacks
        done = len(self.rollbacks) + (0 if gives_up else 1)
        factor = self._options.lr_backoff ** (done - back.moment.rollbacks)
        scale_learning_rates(nested_optimizers(self._state.optimizer), self._state.schedulers, factor)
        if gives_up:
            self._give_up(full_report(self.rollbacks, trouble, at, back.moment.step), trouble)
        self.rollbacks.append(
            Rollback(
                step=at,
                to_step=back.moment.step,
                to_batch=back.moment.batch,
                lr_before=back.lr_before,
                lr_after=learning_rates(self._state.optimizer),
                source=back.source,
                **vars(trouble),
            )
        )
        note_rollback(self._guard, self.rollbacks[-1])
        messages.warn(f"nanscan: {self.rollbacks[-1].describe()}.", NonFiniteWarning)
        if self._guard is not None:
            note_alone(self._guard)

    def blame(self, batch: Any) -> bool:
        """Add a batch, known only now, to those of the last rollback; False if it was there."""
        if batch is None or batch in self.rollbacks[-1].batches:
            return False
        values = {**vars(self.rollbacks[-1]), "batches": (*self.rollbacks[-1].batches, batch)}
        self.rollbacks[-1] = Rollback(**values)
        return True

    def _restore_from_disk(self, trouble: Trouble, before: tuple[float, ...]) -> Return:
        restored = None if self._manager is None else self._manager.restore(**self._parts)
        if restored is None:
            where = "there is no manager" if self._manager is None else "there is no checkpoint on disk"
            reason = "the snapshots in memory were changed from outside: they hold NaN or Inf"
            self._give_up(f"nanscan: training diverged: {trouble.reason}. {reason}, and {where}.", trouble)
        self._state.reset_scaler()
        self._state.clear_grads()
        known = restored.extra.get("recovery", {})
        moment = Moment(restored.step, known.get("batch"), len(known.get("rollbacks", ())))
        self._memory.take(moment)
        return Return(moment, str(restored.path), before)

    def _give_up(self, text: str, trouble: Trouble) -> NoReturn:
        self.given_up = TrainingDiverged(text, _report_of(trouble.bad) if trouble.bad else None)
        raise self.given_up


def _report_of(rows: tuple[TensorReport, ...]) -> Report:
    nan, inf = sum(row.nan_count for row in rows), sum(row.inf_count for row in rows)
    norm = float("nan") if nan else float("inf")
    largest = max(row.inf_norm for row in rows)
    return Report(False, norm, largest, largest, nan, inf, sum(row.numel for row in rows), rows, rows)
