"""The data of the charts, and the events as the page lists them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from nanscan.reporting.events import Event
from nanscan.reporting.maps import layer_map, range_maps
from nanscan.reporting.reading import Log, Run
from nanscan.reporting.series import Axis, stretches, thinned
from nanscan.reporting.values import as_mapping, as_text, number

__all__ = ["page_data"]

DETAIL_BYTES = 800_000
MAX_GROUPS = 400
SHOWN = ("norm", "clip_factor", "clip_limit", "loss", "loss_scale")


def page_data(log: Log) -> dict[str, Any]:
    """Everything that the page draws, as plain data for JSON."""
    runs = log.runs
    axis = Axis(runs)
    events = [(index, event) for index, run in enumerate(runs) for event in run.events]
    groups = list(_groups(events, axis))
    details = _details(events, groups, axis)
    return {
        "series": _series(runs, axis),
        "runs": [
            {"x": start, "step": run.columns["step"][0]}
            for start, run in zip(axis.starts, runs, strict=True)
            if run.steps
        ],
        "limit": _fixed_limit(runs),
        "marks": _marks(runs, axis, events),
        "details": details,
        "groups": groups[:MAX_GROUPS],
        "left_out": {"groups": max(0, len(groups) - MAX_GROUPS), "details": len(events) - len(details)},
        "layers": layer_map(runs, axis),
        "ranges": range_maps(runs, axis),
    }


def _series(runs: list[Run], axis: Axis) -> dict[str, list[list[Any]]]:
    x = axis.all()
    found = {}
    for name in SHOWN:
        values = [value for run in runs for value in run.columns[name]]
        kinds = set(values) - {None}
        dull = not kinds or (name in ("clip_factor", "loss_scale") and kinds == {1.0})
        if not dull:
            found[name] = thinned(x, values)
    if "norm" not in found and len(x):
        found["norm"] = thinned(x, [None] * len(x))
    return found


def _fixed_limit(runs: list[Run]) -> float | None:
    guard = as_mapping(as_mapping(runs[-1].facts.get("settings")).get("guard")) if runs else {}
    return number(guard.get("clip_norm"))


def _marks(runs: list[Run], axis: Axis, events: list[tuple[int, Event]]) -> dict[str, Any]:
    """Kind -> where: stretches of neighbours for steps (none is ever left out), [place, text] for the others."""
    skipped = [axis.at(index, row) for index, run in enumerate(runs) for row in run.skipped]
    marks: dict[str, Any] = {"skip": stretches(skipped)}
    for kind in ("spike", "bad", "weights"):
        places = [axis.at(index, event.row) for index, event in events if event.kind == kind]
        marks[kind] = stretches(places)
    for kind in ("rollback", "checkpoint"):
        notes = [(axis.at(index, note["row"]), note) for index, run in enumerate(runs) for note in run.notes[kind]]
        marks[kind] = [[place, _of_note(kind, note), bool(note.get("error"))] for place, note in notes[-2000:]]
    return marks


def _of_note(kind: str, note: dict[str, Any]) -> str:
    if kind == "rollback":
        return f"back to step {as_text(note.get('to_step'))}: {as_text(note.get('reason'))}"
    if note.get("error"):
        return f"checkpoint of step {as_text(note.get('step'))} {'refused' if note.get('refused') else 'failed'}"
    return f"checkpoint of step {as_text(note.get('step'))}"


def _groups(events: Iterable[tuple[int, Event]], axis: Axis) -> Iterator[dict[str, Any]]:
    """Events of the same kind and tensors on neighbouring steps, as one line of the list."""
    group: dict[str, Any] | None = None
    for index, event in events:
        place = axis.at(index, event.row)
        key = [event.kind, event.title, bool(event.origin)]
        if group is not None and key == group["key"] and place == group["x"] + group["count"] and index == group["run"]:
            group["count"] += 1
            group["last"] = event.step
            continue
        if group is not None:
            yield group
        group = {"key": key, "kind": event.kind, "title": event.title, "x": place, "run": index}
        group |= {"first": event.step, "last": event.step, "count": 1}
    if group is not None:
        yield group


def _details(events: list[tuple[int, Event]], groups: list[dict[str, Any]], axis: Axis) -> dict[str, Any]:
    """Place -> what is shown when it is chosen: those of the list first, then as many more as there is room for."""
    firsts = {group["x"] for group in groups[:MAX_GROUPS]}
    ordered = sorted(events, key=lambda item: axis.at(item[0], item[1].row) not in firsts)
    found: dict[str, Any] = {}
    room = DETAIL_BYTES
    for index, event in ordered:
        detail = _detail(index, event)
        room -= len(json.dumps(detail))
        if room < 0:
            break
        found[str(axis.at(index, event.row))] = detail
    return found


def _detail(index: int, event: Event) -> dict[str, Any]:
    origin = event.origin
    detail: dict[str, Any] = {"run": index + 1, "step": event.step, "title": event.title, "rows": event.rows}
    detail |= {
        "action": event.action,
        "nan": event.nan_count,
        "inf": event.inf_count,
        "more": event.total - len(event.rows),
    }
    if event.lines:
        detail["lines"] = event.lines
    if origin:
        detail["origin"] = {name: value for name, value in origin.items() if value}
    return detail
