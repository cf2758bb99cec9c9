"""What is asked of the values of one field, or of several together, and what to make of the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from nanscan.batches.problem import BatchProblem
from nanscan.batches.quick import Quick

__all__ = ["Answer", "Answers", "Question"]

Answer = Tensor | float
Answers = Sequence[float]


class Question(NamedTuple):
    """Something to compute of one tensor, and what to make of the answers.

    `ask` gives numbers, or 0-dim tensors on the device. Where the first answer is at least `fine[0]` and the last at
    most `fine[1]`, all is well and `judge` need not look. `quick` asks the same of the compiled check; `"beside"`: it
    cannot, but the question takes so little time that it is asked after it; None: there is no compiled check then.
    Where fields are held against each other, `ask` and `judge` get the tensors of `others` too, on the same device.
    """

    leaf: int
    ask: Callable[..., Sequence[Answer]]  # (value, *others)
    judge: Callable[..., list[BatchProblem]]  # (value, answers, *others)
    fine: tuple[float, float] | None = None
    quick: Quick | Literal["beside"] | None = None
    others: tuple[int, ...] = ()

    def beside(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors of `others`."""
        return [leaves[i].to(leaves[self.leaf].device) for i in self.others] if self.others else ()

    def is_well(self, told: Sequence[float]) -> bool:
        """True if these answers leave nothing to judge."""
        return self.fine is not None and self.fine[0] <= told[0] and told[-1] <= self.fine[1]
