"""What `nanscan.preflight` returns: one `Finding` for each thing that is wrong, in a list that prints as a report."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["SEVERITIES", "Finding", "Findings", "Severity"]

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing, before a run starts.

    Attributes:
        code: stable, such as `"NS101"`; `docs/preflight.md` lists them all, `silence={"NS101"}` leaves it out.
        severity: `"error"`: the run fails or learns nothing; `"warning"`: it looks wrong; `"info"`: worth knowing.
        where: dotted name of a parameter or module, or a place such as `optimizer.param_groups[0]`, `batch[1][3]`.
        message: what was found, with numbers.
        fix: what to do about it.

    >>> print(Finding("NS101", "error", "fc.weight", "2 NaN, 0 Inf of 10", "Load another checkpoint."))
    NS101 error   fc.weight: 2 NaN, 0 Inf of 10
                  fix: Load another checkpoint.
    """

    code: str
    severity: Severity
    where: str
    message: str
    fix: str

    def describe(self) -> str:
        """Two lines: what and where; what to do."""
        return f"{self.code} {self.severity:<7} {self.where}: {self.message}\n{'':14}fix: {self.fix}"

    __str__ = describe

    def to_dict(self) -> dict[str, Any]:
        """The attributes by their names, as JSON wants them."""
        return dataclasses.asdict(self)


class Findings(list[Finding]):
    """A list of findings, the most severe first; `print(findings)` is a report for people.

    >>> print(Findings())
    nanscan.preflight: nothing found
    """

    def describe(self) -> str:
        """A line with the counts, each finding in two lines, and how to silence them."""
        if not self:
            return "nanscan.preflight: nothing found"
        counts = Counter(finding.severity for finding in self)
        told = ", ".join(
            f"{counts[s]} {s}{'s' if counts[s] > 1 and s != 'info' else ''}" for s in SEVERITIES if counts[s]
        )
        codes = ", ".join(f'"{code}"' for code in sorted({finding.code for finding in self}))
        lines = [finding.describe() for finding in self]
        return "\n".join([f"nanscan.preflight: {told}", *lines, f"Silence what is meant: silence={{{codes}}}"])

    __str__ = describe
