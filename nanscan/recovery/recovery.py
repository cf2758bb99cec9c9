"""`Recovery`: snapshots of a healthy run, and the way back when it diverges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nanscan import messages
from nanscan.distributed import Agreement, agreement_over
from nanscan.errors import CheckpointError, NonFiniteError
from nanscan.manager import CheckpointManager
from nanscan.recovery.arguments import check_model, checked_options, checked_parts, guard_of
from nanscan.recovery.finite import FiniteCheck
from nanscan.recovery.memory import Memory, Moment
from nanscan.recovery.record import Rollback, Trouble
from nanscan.recovery.replay import Replay
from nanscan.recovery.step_watch import StepWatch, listed
from nanscan.recovery.training_state import TrainingState
from nanscan.recovery.way_back import WayBack
from nanscan.report import TensorReport
from nanscan.snapshot import params_of

__all__ = ["Recovery"]

T = TypeVar("T")


class Recovery:
    """Takes snapshots of a training run while it is well, and goes back to the last one when it diverges.

    Two lines: make it once model and optimizer are there, and call `step()` after each `optimizer.step()` (and
    `scheduler.step()`, `scaler.update()`). It goes back when

    - `patience` steps in a row were bad: the guard of `nanscan.wrap` found a NaN or Inf in the gradients or the loss;
    - the loss given to `step(loss=…)` is NaN or Inf, and the guard did not skip that step anyway;
    - weights, buffers or optimizer state hold a NaN or Inf. They are looked at before each snapshot, at
      each bad step of a guarded optimizer and by its `check_params_every`; a plain optimizer's weights after each step;
    - the guard raised `TrainingDiverged` or `NonFiniteError` inside `with recovery:`, which ends there.

    Going back restores weights, buffers, optimizer state and group options, scheduler, scaler and the random numbers of
    Python, NumPy and PyTorch, bit for bit; clears the gradients; ends the guard's run of skips; and multiplies the
    learning rate by `lr_backoff`, wherever it or a scheduler keeps it. Each time is recorded in `rollbacks` and warned
    about (`NonFiniteWarning`).

    Args:
        model: its parameters (frozen ones too), buffers and extra state. On no meta device.
        optimizer: one of `nanscan.wrap` (recommended: a bad step then costs that step only) or a plain one.
        scheduler: what has `state_dict()` and `load_state_dict()`, or a list of several.
        scaler: a `torch.amp.GradScaler`. Steps that it skips while it searches for its scale don't count as bad: those
            at a scale above 1 that is still falling.
        manager: a `CheckpointManager`: finite states go to disk as well, when it is due, numbered by `step_index`; and
            a restore from disk takes the place of a snapshot in memory that is not intact.
        snapshot_every: steps from one snapshot to the next, at least 1. Two are kept, in memory of the host.
        patience: so many bad steps in a row, at least 1.
        lr_backoff: factor for the learning rate, > 0 and <= 1; several rollbacks multiply.
        max_rollbacks: so many in all; trouble after that restores once more and raises `TrainingDiverged`.

    Raises:
        NonFiniteError: the model, its buffers or the optimizer's state are not finite at construction.
        ValueError, TypeError: an argument is invalid, or parameters have no values yet (meta device, lazy modules).

    With several ranks (DTensors, DDP, or an optimizer wrapped with `process_group=`), all go back when one has to, to
    the same step (one small collective for each `step()`); each keeps copies of its own shards and random numbers. All
    must make their Recovery, and call `step()`, equally often.

    A buffer that holds Inf when it is first seen may go on to hold it (attention masks); a NaN or a new Inf is bad.

    >>> import torch, nanscan
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> recovery = Recovery(model, optimizer)
    >>> model(torch.full((1, 2), float("inf"))).sum().backward()
    >>> optimizer.step()
    >>> recovery.step()  # also warns
    True
    >>> bool(model.weight.isfinite().all()), optimizer.param_groups[0]["lr"]
    (True, 0.05)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        manager: CheckpointManager | None = None,
        snapshot_every: int = 50,
        patience: int = 3,
        lr_backoff: float = 0.5,
        max_rollbacks: int = 5,
    ) -> None:
        self._options = checked_options(snapshot_every, patience, lr_backoff, max_rollbacks)
        check_model(model, optimizer)
        self._optimizer = optimizer
        self._guard = guard_of(optimizer)
        schedulers = checked_parts(scheduler, scaler, manager)
        inner = optimizer if self._guard is None else self._guard.optimizer
        self._own_ranks = agreement_over(None, inner, params_of(inner), model) if self._guard is None else None
        self._state = TrainingState(model, inner, schedulers, scaler, self._guard)
        self._check = FiniteCheck(self._state)
        self._memory = Memory(self._state, self._check)
        self._watch = StepWatch(self._guard, self._check, scaler, patience, self._repair_buffers)
        self._manager = manager
        self._replay = Replay()
        self._way_back = WayBack(self._state, self._memory, self._guard, manager, self._parts(), self._options)
        self._bad_batches: dict[Any, None] = {}
        self._index = 0
        self._last_batch: Any = None
        self._went_back = False  # by an exception in the with block: the next step() tells
        self._sizes = self._state.group_sizes()
        self._first_snapshot()

    # ---- the loop's side ---------------------------------------------------------------------------------------------

    def step(self, loss: Tensor | float | None = None, *, batch: Any = None) -> bool:
        """Look at the step that was taken: take a snapshot if one is due, or go back if the run has diverged.

        Args:
            loss: of this step, a tensor of any shape or a number, unscaled: a NaN or Inf is noticed at once. Reading it
                waits for a GPU; `optimizer.observe(loss)` of a guarded optimizer does not.
            batch: a name of the step's batch, such as its index: what can be hashed. Bad ones are in `bad_batches`.

        Returns:
            True if it went back, also by the exception that a `with recovery:` just before has swallowed.

        Raises:
            TrainingDiverged: it is time to go back once more than `max_rollbacks`; the last good state is restored.
        """
        if batch is None:
            batch = self._replay.current
        if self._went_back:
            self._went_back = False
            self._blame(batch)
            return True
        self._index += 1
        self._last_batch = self._last_batch if batch is None else batch
        due = self._is_due()
        trouble = self._watch.look(loss, batch, wait=due or self._ranks is not None)
        due = due and not self._watch.in_bad_run
        if self._ranks is not None:
            trouble, due = self._agreed(self._ranks, trouble, due)
        if trouble is None and due:
            trouble = self._take_snapshot()
        if trouble is None:
            return False
        self._roll_back(trouble)
        return True

    @property
    def _ranks(self) -> Agreement | None:
        """Those that go back together: of the guarded optimizer, or those that a plain one and the model imply."""
        return self._own_ranks if self._guard is None else self._guard._agreement

    def _anywhere(self, here: bool) -> bool:
        """True if it is so on any rank."""
        ranks = self._ranks
        return here if ranks is None else ranks.in_trouble(here, False, self._index)[0] is not None

    def _agreed(self, ranks: Agreement, trouble: Trouble | None, due: bool) -> tuple[Trouble | None, bool]:
        """The trouble of any rank, and whether a snapshot is due on any, which is then taken on all or none."""
        first, due = ranks.in_trouble(trouble is not None, due, self._index)
        if first is None and due:
            rows = self._check.bad()
            trouble = self._watch.weights(rows) if rows else None
            first, _ = ranks.in_trouble(trouble is not None, due, self._index)
        if first is not None and trouble is None:
            trouble = Trouble("rank", f"rank {first} has to go back; its own report says why")
        return trouble, due

    def __enter__(self) -> Recovery:
        self._went_back = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, NonFiniteError) or error is self._way_back.given_up:
            return False
        rows = () if error.report is None else tuple(error.report.bad or getattr(error.report, "parameters", ()))
        reason = f"{type(error).__name__}: {listed(rows) if rows else error}"
        batch = self._replay.current
        self._index += 1
        self._anywhere(True)  # the others have raised too, or are asking in their step()
        self._roll_back(Trouble("error", reason, rows, () if batch is None else (batch,)))
        self._went_back = True
        return True

    def replay(self, batches: Iterable[T]) -> Iterator[T]:
        """Go through batches; after a rollback once more through those since the restored moment, without the bad ones.

        With it, a run that recovers has seen every good batch in order. Batches are numbered from 0, over all calls;
        `step()` then needs no `batch`. Those since the older snapshot are kept in memory.

        Args:
            batches: a loader, a list, …; not read again.

        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> recovery, seen = Recovery(model, optimizer), []
        >>> for x in recovery.replay([1.0, 2.0, float("nan"), 4.0]):
        ...     optimizer.zero_grad()
        ...     model(torch.tensor([[x]])).sum().backward()
        ...     optimizer.step()
        ...     seen.append(x)
        ...     went_back = recovery.step()
        >>> seen, recovery.bad_batches
        ([1.0, 2.0, nan, 1.0, 2.0, 4.0], (2,))
        """
        return self._replay.run(batches, self)

    # ---- what is known -----------------------------------------------------------------------------------------------

    @property
    def rollbacks(self) -> list[Rollback]:
        """Every rollback so far, oldest first."""
        return list(self._way_back.rollbacks)

    @property
    def bad_batches(self) -> tuple[Any, ...]:
        """The batches that are to blame for rollbacks, by the names given to `step`, in the order they were found."""
        return tuple(self._bad_batches)

    def should_skip(self, batch: Any) -> bool:
        """True if this batch is one of `bad_batches`: leave it out on the way back."""
        return batch in self._bad_batches

    @property
    def step_index(self) -> int:
        """How many steps the present state contains: calls of `step()`, less those that were undone."""
        return self._index

    @property
    def rolled_back_to(self) -> int | None:
        """The `step_index` that the last rollback went back to; None if there was none."""
        return self._way_back.rollbacks[-1].to_step if self._way_back.rollbacks else None

    def _oldest_batch(self) -> Any:
        """The last batch before the older of the snapshots."""
        oldest = self._memory.older or self._memory.newest
        return None if oldest is None else oldest.moment.batch

    # ---- for a program that is resumed -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters, rollbacks and bad batches as plain data; the snapshots stay here: resume weights from a checkpoint.

        With `manager` it is in each checkpoint, as `restored.extra["recovery"]`.
        """
        return {
            "version": 1,
            "step": self._index,
            "batch": self._last_batch,
            "rollbacks": [rollback.to_dict() for rollback in self._way_back.rollbacks],
            "bad_batches": list(self._bad_batches),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the counters of an earlier process; call it when weights and optimizer are restored.

        Raises:
            ValueError: it is not what `state_dict` returns.
            NonFiniteError: the present state, of which a snapshot is taken, is not finite.
        """
        missing = {"step", "rollbacks", "bad_batches"} - state.keys()
        if missing:
            raise ValueError(f"not the state of a Recovery: {', '.join(sorted(missing))} missing in {sorted(state)}")
        self._index = int(state["step"])
        self._last_batch = state.get("batch")
        self._way_back.rollbacks = [Rollback.from_dict(item) for item in state["rollbacks"]]
        self._bad_batches = dict.fromkeys(state["bad_batches"])
        self._replay.start_at(self._last_batch)
        self._memory.forget()
        self._first_snapshot()

    def __repr__(self) -> str:
        done, most = len(self._way_back.rollbacks), self._options.max_rollbacks
        return f"Recovery(step {self._index}, {done} of at most {most} rollbacks)"

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    def _first_snapshot(self) -> None:
        bad = self._memory.take(self._moment())
        if self._anywhere(bool(bad)):
            what = listed(bad) if bad else "another rank's report says what"
            raise NonFiniteError(
                f"nanscan: nothing to go back to: the training state is not finite already: {what}. Make "
                "Recovery when weights, buffers and optimizer state are good, or load a good checkpoint first."
            )

    def _moment(self) -> Moment:
        return Moment(self._index, self._last_batch, len(self._way_back.rollbacks))

    def _is_due(self) -> bool:
        newest = self._memory.newest
        if newest is None or self._index - newest.moment.step >= self._options.snapshot_every:
            return True
        return self._disk_is_due() or self._state.group_sizes() != self._sizes

    def _disk_is_due(self) -> bool:
        """True if the manager has a rhythm of its own and it is time; one without is asked at each snapshot."""
        return self._manager is not None and self._manager.has_rhythm and self._manager.due(self._index)

    def _take_snapshot(self) -> Trouble | None:
        bad = self._memory.take(self._moment())
        if bad:
            return self._watch.weights(bad)
        self._sizes = self._state.group_sizes()
        if self._manager is not None:
            self._save()
        return None

    def _save(self) -> None:
        assert self._manager is not None
        try:
            self._manager.save(self._index, extra={"recovery": self.state_dict()}, **self._parts())
        except NonFiniteError as error:  # the state is good: going back would not help
            raise CheckpointError(
                f'{error} It is a buffer that may hold Inf: give CheckpointManager(..., check_finite="nan").'
            ) from error

    def _parts(self) -> dict[str, Any]:
        scheduler = self._state.schedulers[0] if self._state.schedulers else None
        parts = {"optimizer": self._optimizer, "scheduler": scheduler, "scaler": self._state.scaler}
        return {"model": self._state.model, **{name: part for name, part in parts.items() if part is not None}}

    def _repair_buffers(self, rows: Sequence[TensorReport]) -> bool:
        """The forward pass of a skipped step or dropped micro-batch spoiled buffers only: put these back, and go on."""
        newest = self._memory.newest
        if newest is None or not self._state.restore_buffers(newest.content, [row.name for row in rows]):
            return False
        if self._check.bad():
            return False
        messages.warn(
            f"nanscan: the forward pass of a bad batch spoiled buffers: {listed(rows)}. They are back at their "
            f"values of step {newest.moment.step}; weights and optimizer state are good."
        )
        return True

    # ---- the way back ------------------------------------------------------------------------------------------------

    def _roll_back(self, trouble: Trouble) -> None:
        at = self._index - 1
        for batch in trouble.batches:
            self._bad_batches[batch] = None
        back = self._way_back.restore(trouble, self._anywhere)
        self._watch.forget()
        self._index, self._last_batch = back.moment.step, back.moment.batch
        self._sizes = self._state.group_sizes()
        self._way_back.finish(trouble, at, back)

    def _blame(self, batch: Any) -> None:
        """The batch of the step that raised in the with block is known only now."""
        if self._way_back.blame(batch):
            self._bad_batches[batch] = None
