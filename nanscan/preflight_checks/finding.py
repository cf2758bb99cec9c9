"""What `nanscan.preflight` returns: one `Finding` for each thing that is wrong, in a list that prints as a report."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["SEVERITIES", "Finding", "Findings", "Severity"]

Severity = Literal["error", "warning", "info"]
_SHOWN = 4  # findings of one code in a report
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
        """The counts, each finding in two lines (of many with one code the first four), and how to silence them."""
        if not self:
            return "nanscan.preflight: nothing found"
        counts = Counter(finding.severity for finding in self)
        told = ", ".join(
            f"{counts[s]} {s}{'s' if counts[s] > 1 and s != 'info' else ''}" for s in SEVERITIES if counts[s]
        )
        codes = ", ".join(f'"{code}"' for code in sorted({finding.code for finding in self}))
        lines = [line for code in dict.fromkeys(f.code for f in self) for line in self._of(code)]
        return "\n".join([f"nanscan.preflight: {told}", *lines, f"Silence what is meant: silence={{{codes}}}"])

    def _repr_html_(self) -> str:  # notebooks call it
        from nanscan.reporting.html import findings_html

        return findings_html(self)

    def _of(self, code: str) -> list[str]:
        """The findings of one code; of many alike the first few, and where the others are."""
        same = [finding for finding in self if finding.code == code]
        shown, rest = same[:_SHOWN], [finding.where for finding in same[_SHOWN:]]
        more = f" and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else ""
        tail = [f"{code} {'':<7} also {', '.join(rest[:_SHOWN])}{more}"] if rest else []
        return [finding.describe() for finding in shown] + tail

    __str__ = describe
