"""Reports as a notebook shows them: a few lines of HTML, every name escaped, readable in light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanscan.history import History
    from nanscan.origin.record import Origin
    from nanscan.preflight_checks.finding import Findings
    from nanscan.ranges.row import RangeRow
    from nanscan.ranges.watcher import Watch
    from nanscan.report import Report, StepReport, TensorReport

__all__ = ["findings_html", "history_html", "origin_html", "report_html", "watch_html"]

ROWS = 10
MANY = 50  # of rows that are all of interest
WIDTH, HEIGHT = 400, 48  # of the line of norms, in pixels
RED, GREEN = "#d1374f", "#2f8f57"  # readable on white and on black


def report_html(report: Report) -> str:
    """A report: its totals, then its bad tensors, or the largest ones where all are finite."""
    rows = report.bad or sorted(report.tensors, key=lambda row: -row.norm)[:ROWS]
    parts = [_head(report), _table(ROW_HEADS, map(_row, rows[:ROWS])) if rows else ""]
    parts += [f"<div>and {len(rows) - ROWS} more</div>"] if len(rows) > ROWS else []
    parts += [origin_html(report.origin)] if report.origin is not None else []
    return f"<div>{''.join(parts)}</div>"


def history_html(history: History) -> str:
    """A history: how many steps and skips, the norm as a line, the steps on which something was wrong."""
    reports = list(history)
    bad = [report for report in reports if report.skipped or not report.finite or report.spike is not None]
    skipped = sum(report.skipped for report in reports)
    head = f"{len(reports)} of at most {history.size} steps, {skipped} skipped"
    table = _table(STEP_HEADS, map(_step, bad[-ROWS:])) if bad else ""
    return f"<div><b>{head}</b><br>{_line(reports)}{table}</div>"


def origin_html(origin: Origin) -> str:
    """Where a NaN or Inf was made: the line of code, what went in and came out, what to do."""
    head = escape(origin.one_line().removesuffix(f": {origin.code}") if origin.code else origin.one_line())
    code = f"<pre><code>{escape(origin.code)}</code></pre>" if origin.code else ""
    sides = [("in", item) for item in origin.inputs] + [("out", item) for item in origin.outputs]
    table = _table(("", "tensor"), ((side, item.describe()) for side, item in sides)) if sides else ""
    said = "".join(f"<div><b>{name}:</b> {escape(text)}</div>" for name, text in _said(origin))
    return f'<div><b style="color:{RED}">{head}</b>{code}{table}{said}</div>'


def findings_html(findings: Findings) -> str:
    """What was found before a run, the most severe first."""
    if not findings:
        return f'<div><b style="color:{GREEN}">nanscan.preflight: nothing found</b></div>'
    rows = [(f.code, f.severity, f.where, f.message, f.fix) for f in findings[:MANY]]
    more = f"<div>and {len(findings) - MANY} more</div>" if len(findings) > MANY else ""
    return f"<div>{_table(('code', 'severity', 'where', 'what', 'fix'), rows)}{more}</div>"


def watch_html(watch: Watch) -> str:
    """The first row out of range, and the rows of the last measured step."""
    bad = watch.first_bad
    said = f"nothing left its range in {watch.steps} steps" if bad is None else bad.describe()
    rows = watch.rows(last=1)
    more = f"<div>and {len(rows) - MANY} more rows</div>" if len(rows) > MANY else ""
    table = _table(RANGE_HEADS, map(_range, rows[:MANY])) if rows else ""
    return f'<div><b style="color:{GREEN if bad is None else RED}">{escape(said)}</b>{table}{more}</div>'


RANGE_HEADS = ("step", "module", "kind", "min", "max", "rms", "zero", "underflow", "NaN", "Inf")
ROW_HEADS = ("tensor", "kind", "shape", "dtype", "norm", "NaN", "Inf", "first bad")
STEP_HEADS = ("step", "action", "norm", "what")


def _head(report: Report) -> str:
    step = getattr(report, "step", None)
    where = "" if step is None else f"step {step}, {getattr(report, 'action', '')}: "
    if report.finite:
        return (
            f'<b style="color:{GREEN}">{escape(where)}all finite</b>, norm {report.norm:.6g}, {report.numel:,} elements'
        )
    counts = f"{report.nan_count:,} NaN, {report.inf_count:,} Inf"
    return f'<b style="color:{RED}">{escape(where)}{counts}</b> of {report.numel:,} elements, norm {report.norm:.6g}'


def _row(row: TensorReport) -> tuple[str, ...]:
    first = "" if row.first_bad is None else str(list(row.first_bad))
    counts = f"{row.nan_count:,}", f"{row.inf_count:,}"
    return row.name, row.kind, str(list(row.shape)), row.dtype, f"{row.norm:.4g}", *counts, first


def _range(row: RangeRow) -> tuple[str, ...]:
    numbers = (f"{value:.4g}" for value in (row.min, row.max, row.rms))
    parts = (f"{value:.1%}" for value in (row.zero_fraction, row.underflow_fraction))
    return str(row.step), row.module, row.kind, *numbers, *parts, f"{row.nan_count:,}", f"{row.inf_count:,}"


def _said(origin: Origin) -> list[tuple[str, str]]:
    return [(name, text) for name, text in (("Note", origin.note), ("Hint", origin.hint)) if text]


def _step(report: StepReport) -> tuple[str, ...]:
    what = report.describe(2) if not report.finite else report.spike.describe() if report.spike is not None else ""
    return str(report.step), report.action, f"{report.norm:.4g}", what


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _line(reports: Sequence[StepReport]) -> str:
    """The norms as an SVG line, skipped steps as red ticks."""
    norms = [report.norm for report in reports if math.isfinite(report.norm)]
    if len(norms) < 2:
        return ""
    low, high = min(norms), max(norms)
    across, up = WIDTH / (len(reports) - 1), (HEIGHT - 4) / ((high - low) or 1.0)
    spots = [
        f"{at * across:.1f},{HEIGHT - 2 - (report.norm - low) * up:.1f}"
        for at, report in enumerate(reports)
        if math.isfinite(report.norm)
    ]
    ticks = "".join(
        f'<path d="M{at * across:.1f} 0V{HEIGHT}" stroke="{RED}" stroke-width="1.5"/>'
        for at, report in enumerate(reports)
        if report.skipped
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="gradient norm from {low:.3g} to {high:.3g}">'
        f'{ticks}<polyline points="{" ".join(spots)}" fill="none" stroke="currentColor"/></svg>'
    )
