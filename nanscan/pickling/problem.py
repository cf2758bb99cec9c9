"""One place that does not survive pickling: where it is, what it is, why, and what to do. A leaf: imports nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PickleProblem", "in_lines"]

_LISTED = 20  # lines that a person reads; a history of numbers may hold thousands of one kind


@dataclass(frozen=True)
class PickleProblem:
    """A place in an object that can't be pickled, can't be loaded again, or loses something on the way.

    Args:
        path: the place as one would type it, such as `model.encoder.layers[3]._lock`.
        type: the qualified name of what is there, such as `_thread.RLock`.
        reason: why it can't be saved, loaded or kept.
        fix: what to do about it.
        severity: `"error"`: saving or loading fails; `"loss"`: both work and something is silently gone.
        steps: the same place as `(kind, key)` pairs from the root on, for programs; not compared.
        also: the steps to other places of the same object.

    >>> problem = PickleProblem("model._lock", "_thread.RLock", "a lock can't be pickled", "drop it in __getstate__")
    >>> problem.describe()
    "model._lock (_thread.RLock): a lock can't be pickled; drop it in __getstate__"
    >>> problem.to_dict()["severity"]
    'error'
    """

    path: str
    type: str
    reason: str
    fix: str
    severity: str = "error"
    steps: tuple[tuple[str, Any], ...] = field(default=(), repr=False, compare=False)
    also: tuple[tuple[tuple[str, Any], ...], ...] = field(default=(), repr=False, compare=False)

    def describe(self) -> str:
        """One line: path, type, reason and fix."""
        mark = "" if self.severity == "error" else f" [{self.severity}]"
        return f"{self.path} ({self.type}){mark}: {self.reason}; {self.fix}"

    def to_dict(self) -> dict[str, str]:
        """The texts by their names, as JSON wants them."""
        return {name: getattr(self, name) for name in ("path", "type", "reason", "fix", "severity")}

    __str__ = describe


def in_lines(problems: Sequence[PickleProblem]) -> str:
    """The problems for a message, a line each; of many, the first of each kind, and how many more there are.

    >>> one = PickleProblem("hist[0]", "numpy.float64", "it is refused", "store float(x)")
    >>> print(in_lines([one] * 5000))
    hist[0] (numpy.float64): it is refused; store float(x)
      and 4999 more numpy.float64, the last at hist[0]: store float(x)
    """
    if len(problems) <= _LISTED:
        return "\n  ".join(problem.describe() for problem in problems)
    kinds: dict[tuple[str, str], list[PickleProblem]] = {}
    for problem in problems:
        kinds.setdefault((problem.type, problem.fix), []).append(problem)
    lines = []
    for (kind, fix), alike in list(kinds.items())[:_LISTED]:
        lines.append(alike[0].describe())
        if alike[1:]:
            lines.append(f"and {len(alike) - 1} more {kind}, the last at {alike[-1].path}: {fix.partition('; ')[0]}")
    if len(kinds) > _LISTED:
        lines.append(
            f"and {len(kinds) - _LISTED} more kinds: nanscan.find_unpicklable(state, weights_only=True) has all"
        )
    return "\n  ".join(lines)
