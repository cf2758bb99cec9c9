"""The data of the charts, and the events as the page lists them."""

from __future__ import annotations

from typing import Any

from nanscan.reporting.maps import in_numbers, layer_map, range_maps
from nanscan.reporting.reading import Log, Run
from nanscan.reporting.series import Axis, stretches, thinned
from nanscan.reporting.timeline import MAX_GROUPS, Happening, details, groups, happenings, of_note
from nanscan.reporting.values import as_mapping, number

__all__ = ["page_data"]

MAX_MARKS = 2000  # rollbacks and checkpoints; steps are all marked
SHOWN = ("norm", "clip_factor", "clip_limit", "loss", "loss_scale")


def page_data(log: Log) -> dict[str, Any]:
    """Everything that the page draws, as plain data for JSON."""
    runs = log.runs
    axis = Axis(runs)
    found = happenings(runs, axis)
    lines = list(groups(found))
    shown = details(found, lines[:MAX_GROUPS])
    layers = layer_map(runs, axis)
    return {
        "series": _series(runs, axis),
        "runs": [
            {"x": start, "step": run.columns["step"][0]}
            for start, run in zip(axis.starts, runs, strict=True)
            if run.steps
        ],
        "limit": _fixed_limit(runs),
        "marks": _marks(runs, axis, found),
        "details": shown,
        "groups": lines[:MAX_GROUPS],
        "left_out": {
            "groups": max(0, len(lines) - MAX_GROUPS),
            "details": sum(item.event is not None for item in found) - len(shown),
        },
        "layers": layers,
        "layer_table": in_numbers(layers),
        "ranges": range_maps(runs, axis),
    }


def _series(runs: list[Run], axis: Axis) -> dict[str, list[list[Any]]]:
    x = axis.all()
    found = {}
    for name in SHOWN:
        values = [value for run in runs for value in _column(run, name)]
        kinds = set(values) - {None}
        dull = not kinds or (name in ("clip_factor", "loss_scale") and kinds == {1.0})
        if not dull:
            found[name] = thinned(x, values)
    if "norm" not in found and len(x):
        found["norm"] = thinned(x, [None] * len(x))
    return found


def _column(run: Run, name: str) -> list[float | None]:
    """Of a step that was skipped nothing was clipped."""
    values = run.columns[name]
    if name == "clip_factor" and run.skipped:
        values = list(values)
        for row in run.skipped:
            values[row] = None
    return values


def _fixed_limit(runs: list[Run]) -> float | None:
    guard = as_mapping(as_mapping(runs[-1].facts.get("settings")).get("guard")) if runs else {}
    return number(guard.get("clip_norm"))


def _marks(runs: list[Run], axis: Axis, found: list[Happening]) -> dict[str, Any]:
    """Kind -> where: stretches of neighbours for steps (none is ever left out), [place, text] for the others."""
    skipped = [axis.at(index, row) for index, run in enumerate(runs) for row in run.skipped]
    marks: dict[str, Any] = {"skip": stretches(skipped)}
    for kind in ("spike", "bad", "weights"):
        marks[kind] = stretches([item.x for item in found if item.kind == kind])
    for kind in ("rollback", "checkpoint"):
        notes = [(axis.at(index, note["row"]), note) for index, run in enumerate(runs) for note in run.notes[kind]]
        marks[kind] = [[place, of_note(kind, note), bool(note.get("error"))] for place, note in notes[-MAX_MARKS:]]
    return marks
