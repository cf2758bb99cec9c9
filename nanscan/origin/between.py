"""Traces what runs between a model's output and the step, the loss function, once a step has shown the fault there."""

from __future__ import annotations

import torch
from torch import nn

from nanscan.origin.record import Origin
from nanscan.origin.torch_private import any_mode
from nanscan.origin.trace import Trace

__all__ = ["LossTrace"]

MAX_FORWARDS = 200  # so long it looks; each costs what a trace costs


class LossTrace:
    """Off until `arm`; then on from the end of each training forward to the step, until it has found something."""

    def __init__(self) -> None:
        self.armed = False
        self._left = 0
        self._trace: Trace | None = None
        self._found: Origin | None = None

    @property
    def active(self) -> bool:
        """True if it is on, or will be after the next forward."""
        return self.armed or self._trace is not None

    def arm(self) -> None:
        """Look from the next forward on."""
        self.armed, self._left = True, MAX_FORWARDS

    def begin(self, model: nn.Module) -> None:
        """The model's forward has ended. Not inside another dispatch mode, which has to be on top when it ends."""
        if not self.armed or self._trace is not None or any_mode() or not (model.training and torch.is_grad_enabled()):
            return
        self._left -= 1
        self.armed = self._left > 0
        self._trace = Trace(model)
        self._trace.__enter__()

    def end(self) -> None:
        """The step, or the next forward, begins."""
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.__exit__(None, None, None)
            self._found = self._found or trace.origin

    def take(self) -> Origin | None:
        """What was found since the last call."""
        self.end()
        found, self._found = self._found, None
        if found is not None:
            self.armed = False
        return found
