"""One row of the table of hints: a cause of NaN or Inf, how it is recognised, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanscan.origin.hints.view import View

__all__ = ["Row", "names"]


@dataclass(frozen=True)
class Row:
    """A cause and its cure.

    Attributes:
        name: short and unique, such as `"log of 0"`.
        ops: the operators in which it shows, without `aten.` and without the `_` of in-place ones (`"log"`); autograd
            nodes without their number (`"SqrtBackward"`). Empty for any.
        cause: what is wrong, in general.
        cure: one sentence on what to do, without its full stop.
        said: looks at an event; what is wrong there with its numbers (one sentence, no full stop), None if the row does
            not apply. It may raise: then the row does not apply either.
    """

    name: str
    ops: frozenset[str]
    cause: str
    cure: str
    said: Callable[[View], str | None]

    def text(self, view: View) -> str | None:
        """The hint for an event, None if the row does not apply or can't be asked."""
        if self.ops and view.name not in self.ops:
            return None
        try:
            said = self.said(view)
        except Exception:  # a hint never costs the finding
            return None
        return None if said is None else f"{said}. {self.cure}."


def names(text: str) -> frozenset[str]:
    """Operator names separated by spaces.

    >>> sorted(names("log log2"))
    ['log', 'log2']
    """
    return frozenset(text.split())
