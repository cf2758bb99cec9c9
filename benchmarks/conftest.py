"""What the suites share: the measuring time, the place for figures, and the tables at the end of the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nanscan.bench import Plan
from nanscan.bench.machine import describe, machine

OUTPUT = Path(__file__).parent / "output"
Printer = Callable[[list[Any]], None]


@dataclass
class Figures:
    """What the suites measured: rows by suite, how each suite prints itself, and what could not be measured."""

    rows: dict[str, list[Any]] = field(default_factory=dict)
    printers: dict[str, Printer] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, suite: str, row: Any, printer: Printer) -> None:
        self.rows.setdefault(suite, []).append(row)
        self.printers[suite] = printer

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def to_dict(self) -> dict[str, Any]:
        plain = {name: [_plain(row) for row in rows] for name, rows in self.rows.items()}
        return {"machine": machine(), "notes": self.notes, **plain}


FIGURES = pytest.StashKey[Figures]()


def _plain(row: Any) -> Any:
    return row.to_dict() if hasattr(row, "to_dict") else row


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nanscan benchmarks")
    group.addoption("--seconds", type=float, default=3.0, help="measuring time of one row (default: 3)")
    group.addoption(
        "--compile-rows", default="mlp", help="rows for which torch.compile is tried too, by name (default: mlp; slow)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = Figures()


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Figures:
    return request.config.stash[FIGURES]


@pytest.fixture(scope="session")
def plan(request: pytest.FixtureRequest) -> Plan:
    return Plan(seconds=request.config.getoption("--seconds"))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the tables of ratios and write them as JSON."""
    figures = config.stash[FIGURES]
    if not figures.rows:
        return
    OUTPUT.mkdir(exist_ok=True)
    path = OUTPUT / "figures.json"
    path.write_text(json.dumps(figures.to_dict(), indent=1) + "\n")
    terminalreporter.ensure_newline()
    for suite, rows in figures.rows.items():
        print()
        figures.printers[suite](rows)
    for note in figures.notes:
        print(f"note: {note}")
    print(f"\nmeasured on {describe(machine())}; written to {path}")
