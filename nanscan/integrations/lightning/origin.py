"""`find_origin=True` in automatic optimization: the whole `training_step` is run again, the loss function included."""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from nanscan import messages
from nanscan.origin.record import Origin
from nanscan.origin.recorder import MAX_CALLS, Recorder
from nanscan.origin.replay import find_origin
from nanscan.rng import rng_state, set_rng_state

__all__ = ["StepRecorder"]


class Batch(NamedTuple):
    """What one call of `training_step` got, and the generators' state before it."""

    batch: Any
    batch_idx: int
    rng: dict[str, Any]


class StepRecorder(Recorder):
    """Keeps references to the batches since the last step, and runs `training_step` again on them.

    `self.log` says nothing meanwhile. Parameters, buffers, gradients and random numbers are left as they were.

    Args:
        trainer: whose precision, loss scale and accumulation hold for the replay.
        module: the LightningModule, in automatic optimization.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self._module = module
        self._batches: deque[Batch] = deque(maxlen=MAX_CALLS)

    def close(self) -> None:
        """Let go of the batches."""
        super().close()
        self._batches.clear()

    def note(self, batch: Any, index: int) -> None:
        """A batch is about to be trained on."""
        if index % self._trainer.accumulate_grad_batches == 0:
            self._batches.clear()
        self._batches.append(Batch(batch, index, rng_state()))

    def look(self) -> Origin | None:
        """Run the steps again, oldest first, until one of them makes a NaN or Inf."""
        for noted in self._batches:
            origin = self._origin_of(noted)
            if origin is not None:
                return origin
        return None

    def _origin_of(self, noted: Batch) -> Origin | None:
        with _silent(self._module):
            try:
                return find_origin(lambda: self._run(noted), self._module)
            except Exception as error:  # the search must not end a training that goes on without it
                messages.warn(
                    f"nanscan: find_origin could not run training_step again on batch {noted.batch_idx}: "
                    f"{type(error).__name__}: {error}"
                )
                return None

    def _run(self, noted: Batch) -> None:
        set_rng_state(noted.rng)
        step = self._module.training_step
        plugin = self._trainer.strategy.precision_plugin
        with torch.enable_grad(), plugin.train_step_context():
            output = step(*(noted.batch, noted.batch_idx)[: _positional(step)])
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None or not loss.requires_grad:
            return
        loss = loss / self._trainer.accumulate_grad_batches
        scaler = getattr(plugin, "scaler", None)
        (loss if scaler is None else scaler.scale(loss)).backward()


def _positional(function: Any) -> int:
    """How many of (batch, batch_idx) a `training_step` takes."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 2
    return sum(kind is not inspect.Parameter.KEYWORD_ONLY for kind in kinds)


@contextlib.contextmanager
def _silent(module: Any) -> Iterator[None]:
    """Nothing is logged by `module.log` for a while."""
    before = vars(module).get("log")
    module.log = lambda *args, **kwargs: None
    try:
        yield
    finally:
        if before is None:
            del module.log
        else:
            module.log = before
