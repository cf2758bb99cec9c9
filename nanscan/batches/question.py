"""What is asked of the values of one field, or of several together, and what to make of the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from nanscan.batches.problem import BatchProblem
from nanscan.batches.quick import Quick

__all__ = ["Answer", "Answers", "Question"]

Answer = Tensor | float
Answers = Sequence[float]


class Question(NamedTuple):
    """Something to compute of one tensor, and what to make of the answers.

    `ask` gives numbers, or 0-dim tensors on the device. Where the first answer is at least `fine[0]` and the last at
    most `fine[1]`, all is well and `judge` need not look. `quick` asks the same of the compiled check; None: it cannot.
    Where fields are held against each other, `ask` and `judge` get the tensors of `others` too, on the same device.
    """

    leaf: int
    ask: Callable[..., Sequence[Answer]]  # (value, *others)
    judge: Callable[..., list[BatchProblem]]  # (value, answers, *others)
    fine: tuple[float, float] | None = None
    quick: Quick | None = None
    others: tuple[int, ...] = ()

    def beside(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors of `others`."""
        return [leaves[i].to(leaves[self.leaf].device) for i in self.others] if self.others else ()
