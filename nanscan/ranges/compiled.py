"""A compiled model has no modules while it runs: steps that are measured run the eager one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nanscan.errors import NonFiniteWarning
from nanscan.messages import warn
from nanscan.ranges.names import is_compiled_in_place, is_wrapped_compiled

__all__ = ["EagerSteps", "say_that_nothing_is_seen"]


class EagerSteps:
    """Switches torch.compile off while the forward of a measured step runs; does nothing for an eager model."""

    def __init__(self, model: nn.Module, every: int) -> None:
        # Here and not as a decorator: this imports torch._dynamo, seconds that `import nanscan` must not cost.
        torch.compiler.assume_constant_result(say_that_nothing_is_seen)  # type: ignore[no-untyped-call]
        self._stance: Any = None
        self._needed = is_wrapped_compiled(model)
        if is_compiled_in_place(model):
            say_that_nothing_is_seen()
        elif self._needed:
            steps = "each step" if every == 1 else f"one step in {every}"
            warn(
                f"nanscan: the watched model is compiled, and compiled code has no modules to look at: {steps} is "
                "measured, and runs the eager model, which is slower and rounds differently. Give every=50 or more.",
                NonFiniteWarning,
            )

    def enter(self) -> None:
        """Before the forward."""
        if self._needed and self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")

    def leave(self) -> None:
        """After it, well or not."""
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None


def say_that_nothing_is_seen() -> int:
    """Warn; torch.compile calls this once, while it traces."""
    warn(
        "nanscan: the watched model runs compiled: none of its modules was seen, and nothing is measured. Call "
        "nanscan.watch(...) on what torch.compile returned: steps that are measured then run the eager model.",
        NonFiniteWarning,
    )
    return 0
