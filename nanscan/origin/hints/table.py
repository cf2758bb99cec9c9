"""The table of hints: every row, in the order in which they are asked."""

from __future__ import annotations

from torch import Tensor

from nanscan.origin.hints import (
    arithmetic,
    attention,
    backward,
    functions,
    half,
    linalg,
    losses,
    normalisation,
    outside,
    overflow,
    reductions,
)
from nanscan.origin.hints.row import Row
from nanscan.origin.hints.view import View
from nanscan.origin.record import OpEvent

__all__ = ["ROWS", "hint_for", "hint_table", "rows_for"]

# Special cases before general ones: the first row that applies speaks.
ROWS: tuple[Row, ...] = (
    *losses.ROWS,
    *outside.ROWS,
    *attention.ROWS,
    *normalisation.ROWS,
    *half.ROWS,
    *reductions.ROWS,
    *arithmetic.ROWS,
    *functions.ROWS,
    *linalg.ROWS,
    *backward.ROWS,
    *overflow.ROWS,
)


def rows_for(event: OpEvent) -> list[tuple[str, str]]:
    """The name and the words of every row that applies, best first."""
    view = View(event)
    found = ((row.name, row.text(view)) for row in ROWS)
    return [(name, text) for name, text in found if text is not None]


def hint_for(event: OpEvent) -> str | None:
    """The usual cause and the cure for an op that made a NaN or Inf, None if nothing is known.

    Args:
        event: the op with its live tensors; they are read, never changed or kept. Only a few single elements and
            counts are read, so that tensors on a GPU cost a few transfers.

    Returns:
        One or two sentences, with the numbers at hand.

    >>> import torch
    >>> x = torch.tensor([1.0, 0.0])
    >>> event = OpEvent("aten.log", "forward", "inf", inputs=(x,), outputs=(x.log(),), first_bad=(1,), args=(x,))
    >>> hint_for(event).split(". ")[0]
    'log(0) is -inf (1 of 2 elements, flat indices [1])'
    """
    view = View(event)
    for row in ROWS:
        text = row.text(view)
        if text is not None:
            return text
    return _unseen(view) if event.phase == "backward" and event.outputs else None


def _unseen(view: View) -> str | None:
    """The usual cause of a node, where what its forward had saved is gone: a checkpoint gives it once, to the node."""
    row, saved = next((row for row in ROWS if view.name in row.ops), None), view.event.saved
    exponent = saved.get("exponent")
    told = isinstance(exponent, (int, float)) and exponent >= 1
    if row is None or told or any(isinstance(value, Tensor) for value in saved.values()):
        return None
    return f"probably {row.name}{view.where} ({row.cause}; a checkpoint does not keep the values to tell). {row.cure}."


def hint_table() -> list[tuple[str, str, str]]:
    """Every cause that is known: (name, cause, cure).

    >>> [cause for name, cause, cure in hint_table() if name == "log of 0"]
    ['log(0) is -inf']
    """
    return [(row.name, row.cause, row.cure) for row in ROWS]
