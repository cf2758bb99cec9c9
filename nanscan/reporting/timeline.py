"""The list of events, and what is shown of each: skips and the like, rollbacks, checkpoints that were refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nanscan.reporting.events import Event
from nanscan.reporting.reading import Run
from nanscan.reporting.series import Axis
from nanscan.reporting.values import as_text

__all__ = ["MAX_GROUPS", "details", "groups", "happenings", "of_note"]

DETAIL_BYTES = 800_000
MAX_GROUPS = 400
MAX_TITLE = 300


@dataclass(frozen=True, slots=True)
class Happening:
    """Something at a place on the axis; `event` is None for a rollback or a refused checkpoint."""

    x: int
    run: int
    step: int
    kind: str
    title: str
    event: Event | None = None


def happenings(runs: list[Run], axis: Axis) -> list[Happening]:
    """All of them, by place."""
    found = []
    for index, run in enumerate(runs):
        for event in run.events:
            x = axis.at(index, event.row)
            found.append(Happening(x, index, event.step, event.kind, event.title[:MAX_TITLE], event))
        for kind, note in _notes(run):
            row = note["row"]
            step = run.columns["step"][row] if run.steps else 0
            found.append(Happening(axis.at(index, row), index, step, kind, of_note(kind, note)[:MAX_TITLE]))
    return sorted(found, key=lambda happening: happening.x)


def _notes(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    for note in run.notes["rollback"]:
        yield "rollback", note
    for note in run.notes["checkpoint"]:
        if note.get("error"):
            yield "checkpoint", note


def of_note(kind: str, note: dict[str, Any]) -> str:
    """A few words."""
    if kind == "rollback":
        return f"back to step {as_text(note.get('to_step'))}: {as_text(note.get('reason')).partition('; ')[0]}"
    if note.get("error"):
        return f"checkpoint of step {as_text(note.get('step'))} {'refused' if note.get('refused') else 'failed'}"
    return f"checkpoint of step {as_text(note.get('step'))}"


def groups(found: list[Happening]) -> Iterator[dict[str, Any]]:
    """Events of the same kind and tensors on neighbouring steps, as one line; it leads to the first with an origin."""
    group: dict[str, Any] | None = None
    for item in found:
        origin = item.event is not None and bool(item.event.origin)
        if group is not None and _continues(group, item):
            group.update(count=group["count"] + 1, last=item.step, end=item.x)
            if origin and not group["origin"]:
                group.update(x=item.x, origin=True)
            continue
        if group is not None:
            yield group
        group = {"kind": item.kind, "title": item.title, "x": item.x, "end": item.x, "run": item.run}
        group |= {"first": item.step, "last": item.step, "count": 1, "origin": origin}
    if group is not None:
        yield group


def _continues(group: dict[str, Any], item: Happening) -> bool:
    same = (group["kind"], group["title"], group["run"]) == (item.kind, item.title, item.run)
    return same and item.event is not None and item.x == group["end"] + 1


def details(found: list[Happening], listed: list[dict[str, Any]]) -> dict[str, Any]:
    """Place -> what is shown when it is chosen: those of the list first, then as many more as there is room for."""
    firsts = {group["x"] for group in listed}
    room = DETAIL_BYTES
    shown: dict[str, Any] = {}
    for item in sorted(found, key=lambda item: item.x not in firsts):
        if item.event is None:
            continue
        detail = _detail(item.run, item.event)
        room -= len(json.dumps(detail))
        if room < 0:
            break
        shown[str(item.x)] = detail
    return shown


def _detail(index: int, event: Event) -> dict[str, Any]:
    detail: dict[str, Any] = {"run": index + 1, "step": event.step, "title": event.title, "rows": event.rows}
    detail |= {
        "action": event.action,
        "nan": event.nan_count,
        "inf": event.inf_count,
        "more": event.total - len(event.rows),
    }
    if event.lines:
        detail["lines"] = event.lines
    if event.origin:
        detail["origin"] = {name: value for name, value in event.origin.items() if value}
    return detail
