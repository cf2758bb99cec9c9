"""What of a checkpoint was matched to a model or an optimizer, and what was not, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["MatchReport", "Mismatch"]


class Mismatch(NamedTuple):
    """A name that both sides have, and why what is stored under it can't be loaded."""

    name: str
    reason: str


@dataclass(frozen=True)
class MatchReport:
    """What `load_model_state` or `load_optimizer_state` matched by name.

    Attributes:
        what: what was loaded into, `"model"` or `"optimizer"`.
        loaded: names that were loaded, as the model calls them.
        adapted: (name in the checkpoint, name in the model) where a wrapper's prefix was the difference.
        missing: names that the model has and the checkpoint has not.
        unexpected: names that the checkpoint has and the model has not.
        mismatched: names that both have, but with another shape or kind of value.
        converted: names whose dtype is not the checkpoint's, and both dtypes; they are loaded.
        notes: anything else that should be known: likely renamings, options of merged groups ….

    >>> report = MatchReport("model", loaded=("weight",), adapted=(("module.weight", "weight"),), missing=("bias",))
    >>> report.complete
    False
    >>> print(report.describe())
    1 of 2 names of the model loaded (1 adapted: 'module.weight' -> 'weight')
    missing in the checkpoint (1): 'bias'
    """

    what: str
    loaded: tuple[str, ...] = ()
    adapted: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    converted: tuple[Mismatch, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True if every name was matched on both sides."""
        return not (self.missing or self.unexpected or self.mismatched)

    def describe(self) -> str:
        """Every name that did not match, a line for each kind of difference; the first line is the count."""
        return "\n".join([self._summary(), *self.differences()])

    def differences(self) -> list[str]:
        """One line for each kind of difference, with every name."""
        lines = []
        if self.missing:
            lines.append(f"missing in the checkpoint ({len(self.missing)}): {_quoted(self.missing)}")
        if self.unexpected:
            lines.append(f"not in the {self.what} ({len(self.unexpected)}): {_quoted(self.unexpected)}")
        if self.mismatched:
            lines.append(f"not the same ({len(self.mismatched)}): {_explained(self.mismatched)}")
        if self.converted:
            lines.append(f"of another dtype ({len(self.converted)}): {_explained(self.converted)}")
        return lines + list(self.notes)

    def _summary(self) -> str:
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        text = f"{len(self.loaded)} of {total} names of the {self.what} loaded"
        if not self.adapted:
            return text
        saved, own = self.adapted[0]
        return f"{text} ({len(self.adapted)} adapted: '{saved}' -> '{own}'{', …' if len(self.adapted) > 1 else ''})"


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _explained(items: tuple[Mismatch, ...]) -> str:
    return "; ".join(f"'{item.name}' {item.reason}" for item in items)
