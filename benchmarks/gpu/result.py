"""What a section hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Section:
    """One section's outcome: whether it holds, the lines a person reads, and the figures.

    >>> section = Section()
    >>> section.check("bits are equal", 1 + 1 == 2); section.check("no host sync", False, "3 of them")
    >>> section.ok, section.lines
    (False, ['ok     bits are equal', 'FAILED no host sync: 3 of them'])
    """

    ok: bool = True
    lines: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def check(self, what: str, holds: bool, detail: str = "") -> None:
        """Note whether something holds; one that doesn't fails the section."""
        self.ok = self.ok and holds
        self.lines.append(f"{'ok    ' if holds else 'FAILED'} {what}{f': {detail}' if detail else ''}")

    def say(self, line: str) -> None:
        self.lines.append(f"       {line}")

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "lines": self.lines, "figures": self.figures}
