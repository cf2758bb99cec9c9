"""What the walk could not tell is tried: pickling without the data of tensors here, loading in a subprocess."""

from __future__ import annotations

from typing import Any

from nanscan.pickling import light
from nanscan.pickling.depth import too_deep
from nanscan.pickling.naming import render, type_name
from nanscan.pickling.places import Finding, Place
from nanscan.pickling.walk import Walk

__all__ = ["check_pickling", "prove_loading"]

_TRIED_OF_ONE_CLASS = 20


def check_pickling(walk: Walk, roots: list[Place], for_process: bool) -> None:
    """Pickle the roots for a trial, leaving out what is at fault already: nothing may have escaped the walk."""
    if any(step[0] == "text" for finding in walk.findings for step in finding.place.path()):
        return  # what a reducer made for its answer is made anew by the trial, and would be met again
    for root in roots:
        with light.spawning(for_process):
            error = light.failure(root.value, for_process, walk.skipped())
        if isinstance(error, RecursionError):
            walk.findings.append(too_deep(root, for_process, walk.skipped()))
        elif error is not None:
            reason = f"pickling it raises {type(error).__name__}: {error}"
            walk.findings.append(Finding(root, type_name(root.value), reason, "leave it out, or save its parts"))


def prove_loading(walk: Walk, name: str, for_process: bool) -> None:
    """Load elsewhere those places whose own code runs on loading; the innermost that fails is at fault."""
    from nanscan.pickling.proof import loads_elsewhere

    open_places = _without_errors(walk)
    outermost = [place for place in open_places if not any(p in open_places for p in list(place.upwards())[1:])]
    asked = {render(name, place.path()): place for place in outermost}
    failing = {p.path: p for p in loads_elsewhere(_values(asked), for_process=for_process)}
    inner = {
        render(name, place.path()): place
        for place in open_places
        if any(render(name, p.path()) in failing for p in list(place.upwards())[1:])
    }
    if failing and inner:
        asked |= inner
        failing |= {p.path: p for p in loads_elsewhere(_values(inner), for_process=for_process)}
    for path, problem in failing.items():
        if not any(asked[path] in list(asked[other].upwards())[1:] for other in failing):
            found = Finding(asked[path], problem.type, problem.reason, problem.fix, problem.severity)
            walk.findings.append(found)


def _values(places: dict[str, Place]) -> dict[str, Any]:
    return {path: place.value for path, place in places.items()}


def _without_errors(walk: Walk) -> list[Place]:
    """Those of the open places that neither hold nor are in what fails to pickle; of one class a few are enough."""
    errors = [finding.place for finding in walk.findings if finding.severity == "error"]
    spoilt = {id(p) for place in errors for p in place.upwards()}
    at_fault = {id(place) for place in errors}
    counts: dict[type, int] = {}
    chosen = []
    for place in walk.unsettled:
        kind = type(place.value)
        counts[kind] = counts.get(kind, 0) + 1
        inside = any(id(p) in at_fault for p in place.upwards())
        if id(place) not in spoilt and not inside and counts[kind] <= _TRIED_OF_ONE_CLASS:
            chosen.append(place)
    return chosen
