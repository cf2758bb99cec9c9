"""`CheckpointManager`: what a training loop sees."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from nanscan import messages
from nanscan.checkpoint.atomic import remove_leftovers
from nanscan.checkpoint.save import save
from nanscan.errors import CheckpointError, CheckpointWarning
from nanscan.manager import exits
from nanscan.manager.apply import apply, report_differences
from nanscan.manager.arguments import checked_extra, checked_folder, checked_parts, checked_path, one_of
from nanscan.manager.choose import choose
from nanscan.manager.contents import contents, unstored
from nanscan.manager.failures import Failures, OnError
from nanscan.manager.folder import Entry, Folder
from nanscan.manager.metric import Metric, as_number
from nanscan.manager.restored import Restored
from nanscan.manager.retention import Retention
from nanscan.manager.schedule import Schedule, as_step, positive_int
from nanscan.manager.sharded.saving import copied, save_together
from nanscan.manager.sharded.together import Together
from nanscan.manager.writer import Writer
from nanscan.reporting.notes import Checkpoints
from nanscan.state_copy import StateCopy

__all__ = ["CheckpointManager"]

OnSigterm = Literal["exit", "stop"]


class CheckpointManager:
    """Saves a training run now and then, keeps the newest and the best good checkpoints, and resumes from them.

    One file for each saved step, `step-00000120.pt`, is written by `nanscan.save`: in one moment, with digests, and
    only if weights and optimizer state are finite. It holds a dict with "step", "epoch", "model", "optimizer",
    "scheduler", "scaler", "loader", "rng" and "extra", as far as they were given, and `nanscan.load` and `torch.load`
    open it too. Files of other names in the folder are never touched.

    In the background, `save` only copies the state (into host memory that is used over and over: at most two copies
    exist, then it waits) and training goes on while a thread writes it. Errors of that thread are raised by the next
    `save`, `flush` or `close`. Interpreter exit waits for what is pending. So does SIGTERM, by a handler that the
    first manager installs if it is made in the main thread; see `on_sigterm`. SIGKILL loses what is pending.

    With several ranks whose parameters are DTensors (`fully_shard`, tensor parallelism), every rank calls `save` and
    `restore`: a checkpoint is then a folder `step-00000120`, written by torch.distributed.checkpoint, each rank its
    shards, and complete once a marker is in it. What is decided, or goes wrong, is so on all ranks; any number of ranks
    can restore it. With `process_group=`, replicas of DDP do the same with one file, which the first rank writes;
    without it, save them on one rank. A process that was forked from the manager's owner can't save.

    Args:
        directory: folder of the checkpoints; made by the first save. Relative paths are those of now.
        keep: how many of the newest good checkpoints stay, at least 1.
        every_steps: a call of `save` saves if its step is a multiple of this; None: steps don't count.
        every_seconds: … if so many seconds have passed since the last save; with both, either suffices; with neither,
            each call saves.
        best: a pair such as `("accuracy", "max")`: the checkpoints with the largest (`"min"`: smallest)
            `extra["accuracy"]` stay too. NaN and Inf are never the best.
        best_keep: how many of these.
        background: False: `save` returns when the file is safely on the disk.
        check_finite: as for `nanscan.save`: `"nan"` lets Inf pass (buffers such as masks may hold -inf), False all.
        on_unpicklable: likewise: `"drop"` leaves out, with a warning, what would not load again without running code.
        on_sigterm: `"exit"`: write what is pending, then do what SIGTERM did before (end the process, with its exit
            status, or call the program's own handler). `"stop"`: only set `stop_requested`, for a loop that saves and
            ends by itself; a second SIGTERM acts as "exit". None: leave SIGTERM alone.
        on_error: `"warn"`: training goes on where a checkpoint could not be written (full disk, a value that does not
            pickle), with a warning; `failed_saves` counts them. A state with a NaN is an error all the same.
        process_group: as for `nanscan.wrap`: whose ranks save and restore together; None: those of the DTensors, if
            there are any; True: the default group; False: this process alone.

    Attributes:
        stop_requested: a SIGTERM has come; of several ranks that save together, to one of them before the last `save`.

    Raises:
        ValueError, TypeError: an option is invalid.
        CheckpointSystemError: `directory` is a file.

    >>> import tempfile
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder, keep=2, every_steps=10) as manager:
    ...     saved = [manager.save(step, model=model, optimizer=optimizer) for step in range(1, 41)]
    ...     manager.flush()
    ...     names = [path.name for path in manager.checkpoints()]
    ...     restored = manager.restore(model=model, optimizer=optimizer)
    >>> names, restored.step
    (['step-00000030.pt', 'step-00000040.pt'], 40)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        best: tuple[str, str] | None = None,
        best_keep: int = 1,
        background: bool = True,
        check_finite: bool | Literal["nan"] = True,
        on_unpicklable: Literal["raise", "drop"] = "raise",
        on_sigterm: OnSigterm | None = "exit",
        on_error: OnError = "raise",
        process_group: Any = None,
    ) -> None:
        self.directory = checked_folder(directory)
        self.stop_requested = False
        self._schedule = Schedule(every_steps, every_seconds)
        self._metric = Metric.of(best)
        self._folder = Folder(self.directory)
        self._retention = Retention(
            self._folder, positive_int("keep", keep), self._metric, positive_int("best_keep", best_keep)
        )
        self._check_finite = one_of("check_finite", check_finite, (True, False, "nan"))
        self._on_unpicklable = one_of("on_unpicklable", on_unpicklable, ("raise", "drop"))
        self._on_sigterm = one_of("on_sigterm", on_sigterm, ("exit", "stop", None))
        self._failures = Failures(on_error)
        self._signalled = False
        self._together = Together(process_group)
        self._background = bool(background)
        self._writer = Writer()
        weakref.finalize(self, self._writer.send_home)
        self._told: set[str] = set()
        self._noted = Checkpoints()
        self._closed = False
        self._pid = os.getpid()
        exits.watch(self, sigterm=on_sigterm is not None)

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        epoch: int | None = None,
        extra: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> Path | None:
        """Save the run if a save is due. Call it after each step, when all parts are as they should be resumed.

        Args:
            step: how many steps were taken, at least 0. A step that was saved before is replaced.
            model: saved without prefixes of DDP and torch.compile; several as one `nn.ModuleDict`. None is not saved.
            optimizer: also one of `nanscan.wrap`, with its counters.
            scheduler: its functions (those of a LambdaLR) are not stored, which is warned about once.
            scaler: a `torch.amp.GradScaler`.
            loader: its position is stored if it has `state_dict()`, as torchdata's `StatefulDataLoader` has.
            epoch: kept for you.
            extra: a dict of your own: numbers, strings, tensors, lists and dicts of these; an object in it that has a
                `state_dict()` is stored by that.
            force: save in any case.

        Returns:
            The path of the checkpoint (in the background: where it is going to be), None if no save was due or, with
            `on_error="warn"`, this one failed.

        Raises:
            NonFiniteError: weights or optimizer state hold NaN or Inf; older checkpoints stay. In the background this
                and the others are raised by the next call, which does its own work first.
            CheckpointError: it could not be saved, or the manager is closed.
            ValueError, TypeError: an argument is invalid, or `extra` lacks the metric of `best`.
        """
        self._check_usable()
        step = as_step(step)
        epoch = None if epoch is None else positive_int("epoch", epoch, least=0)
        self._noted.of(optimizer)
        given = (model, optimizer, scheduler, scaler, loader)
        if self._together.find(model, optimizer) is not None:
            return save_together(self, step, model, lambda: self._state(step, epoch, given, extra), force)
        checked_parts(*given, method="state_dict")  # at the first step, not when the first save is due
        if not (force or self._schedule.due(step)):
            self._raise_pending()
            return None
        states = [self._state(step, epoch, given, extra)]
        try:
            with exits.deferred():
                failed = self._take(step, states)
        except Exception as error:
            self._failures.tell(error)
            return None
        self._failures.tell(failed)
        return self._folder.file(step)

    def _state(self, step: int, epoch: int | None, given: tuple[Any, ...], extra: Any) -> dict[str, Any]:
        """What is saved, still sharing tensors with the parts."""
        parts = checked_parts(*given, method="state_dict")
        extra = checked_extra(extra)
        if self._metric is not None:
            number = self._metric.required(extra)
            if isinstance(extra[self._metric.name], torch.Tensor):  # which may not be NaN; a number may
                extra = {**extra, self._metric.name: number}
        self._warn_once([*unstored(parts), *self._folder.left_behind(step)])
        with exits.deferred():
            return contents(step, epoch, parts, extra)

    def _metric_of(self, state: dict[str, Any]) -> dict[str, float]:
        """The number of `best` by its name, if there is one."""
        number = None if self._metric is None else as_number(state["extra"][self._metric.name])
        return {} if self._metric is None or number is None else {self._metric.name: number}

    def due(self, step: int) -> bool:
        """True if `save(step, …)` would save now: for a loop that has to prepare what it saves.

        Of several ranks, this one's clock is asked; in `save`, that of the first.
        """
        return self._schedule.due(as_step(step))

    @property
    def failed_saves(self) -> int:
        """How many saves have failed, as far as `save`, `flush` and `close` have told; those refused for a NaN too."""
        return self._failures.count

    @property
    def has_rhythm(self) -> bool:
        """True if `every_steps` or `every_seconds` says when a save is due; else every call is."""
        return self._schedule.every_steps is not None or self._schedule.every_seconds is not None

    def _take(self, step: int, states: list[dict[str, Any]]) -> BaseException | None:
        """Write what the list holds, or have it written; returns the error of an earlier save that is still untold."""
        if not self._background:
            self._write(step, states.pop())
            self._schedule.saved()
            return None
        buffer = self._writer.take_buffer()
        try:  # of the state nothing is left when the thread begins: a tensor let go beside it waits for its turn
            snapshot = copied(states.pop(), buffer)
        except BaseException:
            self._writer.give_back(None)
            raise
        failed = self._writer.next_error()  # before this one can fail: that is for the next call
        self._writer.submit(step, snapshot, self._write_copy)
        self._schedule.saved()
        return failed

    def _write_copy(self, step: int, copied: StateCopy) -> None:
        self._write(step, copied.result)

    def _write(self, step: int, state: dict[str, Any]) -> None:
        """Write one checkpoint, then let older ones go."""
        entry = Entry(step, self._folder.file(step))
        with self._noted.saving(step, entry.path):
            save(state, entry.path, check_finite=self._check_finite, on_unpicklable=self._on_unpicklable)
        self._retention.wrote(entry, next(iter(self._metric_of(state).values()), None))
        self._retention.apply(step)
        for path in self._folder.unfinished():
            remove_leftovers(str(path))

    def flush(self) -> None:
        """Wait until everything is written; raises the error of a background save that nobody was told about."""
        self._writer.wait()
        self._raise_pending()

    def close(self) -> None:
        """`flush`, and give SIGTERM back. The manager can't save any more; closing it again does nothing."""
        if self._closed or self._pid != os.getpid():
            return
        self._writer.end()
        self._closed = True
        exits.unwatch(self)
        self._together.close()
        error = self._next_error()
        while (other := self._next_error()) is not None:
            self._failures.count += 1
            messages.warn(f"nanscan: another checkpoint was not saved: {other}", CheckpointWarning)
        self._failures.tell(error)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:  # the exception that ends the block must not be hidden by another one
            self.close()
        except Exception as failed:
            messages.warn(f"nanscan: a checkpoint was not saved: {failed}", CheckpointWarning)

    # ---- resuming ----------------------------------------------------------------------------------------------------

    def restore(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        strict: bool = True,
        path: str | os.PathLike[str] | None = None,
    ) -> Restored | None:
        """Resume from the newest checkpoint that verifies: all parts, then the random state. All of it, or nothing.

        Newer files that are torn, changed, foreign or full of NaN are passed over, each with a `CheckpointWarning`.
        Values are copied to where the parts have them; the optimizer's state is matched by parameter name and keeps
        its precision, or follows its parameter's dtype. A file of `torch.save` with these parts is taken, too.

        Args:
            model, optimizer, scheduler, scaler, loader: what to load into, built as before; None: not restored.
            strict: False: load what matches of model and optimizer, and warn about the rest.
            path: take this file instead of the newest; `best_checkpoint()` gives one; a model's state alone will do.

        Returns:
            What was found, with `.step`, `.epoch`, `.extra`, `.path`; None if the folder holds no checkpoint.

        Raises:
            CorruptCheckpoint: no checkpoint of the folder can be used; lists each with its reason.
            CheckpointError: a part does not match its state. All parts and the random state are as they were.

        Warns:
            CheckpointWarning: parts that were asked for and are not in the file, or the other way round, by name.
        """
        parts = checked_parts(model, optimizer, scheduler, scaler, loader, method="load_state_dict")
        self._together.find(model, optimizer)
        self._writer.wait()
        ranks = self._together.front
        chosen = choose(self._folder, checked_path(path), parts, ranks, self._check_finite is not False)
        if chosen is None:
            return None
        missing, unused = report_differences(chosen.saved, parts)
        matches = apply(chosen.saved, parts, strict, ranks)
        return Restored(
            step=chosen.saved["step"],
            epoch=chosen.saved.get("epoch"),
            extra=chosen.saved.get("extra", {}),
            path=chosen.path,
            passed_over=chosen.passed_over,
            missing=missing,
            unused=unused,
            model_match=matches.get("model"),
            optimizer_match=matches.get("optimizer"),
        )

    def checkpoints(self) -> list[Path]:
        """The checkpoints that are in the folder now, oldest step first; not verified, nothing is waited for."""
        return [entry.path for entry in self._folder.entries()]

    def best_checkpoint(self) -> Path | None:
        """The good checkpoint with the best metric, after waiting for what is pending; None if there is none."""
        self._writer.wait()
        found = self._retention.best(self._folder.entries())
        return found[0].path if found else None

    # ---- errors and ends ---------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed:
            raise CheckpointError(f"the manager of '{self.directory}' is closed: make a new one to save")
        if self._pid != os.getpid():
            raise CheckpointError(
                f"the manager of '{self.directory}' belongs to process {self._pid}, from which this one was forked: "
                "save there, or make a manager here"
            )

    def _next_error(self) -> BaseException | None:
        return self._writer.next_error() or self._together.next_error()

    def _raise_pending(self) -> None:
        while (error := self._next_error()) is not None:
            self._failures.tell(error)

    def _warn_once(self, sentences: list[str]) -> None:
        for text in sentences:
            if text not in self._told:
                self._told.add(text)
                messages.warn(f"nanscan: {text}. (This is said once.)", CheckpointWarning)

    def _stop(self) -> bool:
        """A SIGTERM has come; True if the loop is to end by itself."""
        first, self._signalled = not self._signalled, True
        if not self._together.active:  # else all ranks are told by the next save
            self.stop_requested = True
        return first and self._on_sigterm == "stop"

    def _finish_at_exit(self) -> None:
        self._writer.end()
        while (error := self._next_error()) is not None:
            print(f"nanscan: a checkpoint in '{self.directory}' was not saved: {error}", file=sys.stderr, flush=True)

    def __repr__(self) -> str:
        return f"CheckpointManager({str(self.directory)!r})"
