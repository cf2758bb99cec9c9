"""A step on which something was wrong or was done: what the report says when it is clicked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nanscan.reporting.values import as_int, as_list, as_mapping, as_text, number

__all__ = ["Event", "event_of"]

MAX_ROWS = 8
TEXTS = ("kind", "phase", "op", "module", "name", "file", "code", "note", "hint")
SIDES = ("inputs", "outputs")


@dataclass(slots=True)
class Event:
    """One such step.

    Attributes:
        row: which of the run's steps it is, from 0.
        step: its number in the log.
        kind: `"skip"`, `"spike"`, `"bad"` (a NaN or Inf, but stepped) or `"weights"`.
        action: what was done.
        nan_count: in all tensors.
        inf_count: in all tensors.
        rows: what is said of each bad tensor (at most 8).
        names: the names of all of them, a loss first: it is what a person looks for.
        total: how many there were.
        origin: where the first NaN or Inf was made, {} if unknown.
        lines: what else there is to say.
        spike: of what it is a spike, "" if it is none.
        bad_loss: the loss itself was NaN or Inf.
    """

    row: int
    step: int
    kind: str
    action: str
    nan_count: int
    inf_count: int
    rows: list[str]
    names: tuple[str, ...]
    total: int
    origin: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    spike: str = ""
    bad_loss: bool = False

    @property
    def title(self) -> str:
        """A few words."""
        first = self.names[0] if self.names else ""
        more = f" and {self.total - 1} more" if self.total > 1 else ""
        if self.spike and not first:
            first = f"spike of the {self.spike}" if self.kind == "skip" else f"{self.spike}, action: {self.action}"
        words = {"skip": "skipped", "spike": "spike", "bad": f"NaN or Inf, action: {self.action}"}
        words["weights"] = "weights hold NaN or Inf"
        return f"{words[self.kind]}{': ' if first else ''}{first}{more}"


def event_of(row: int, step: int, data: dict[str, Any]) -> Event | None:
    """The event that a step's line is, None if all was well."""
    skipped, spike = data.get("skipped") is True, as_mapping(data.get("spike"))
    weights, bad = as_list(data.get("parameters")), as_list(data.get("bad"))
    unwell = data.get("finite") is False
    if not (skipped or spike or weights or bad or unwell):
        return None
    kind = "skip" if skipped else "weights" if weights else "bad" if bad or unwell else "spike"
    rows = [as_mapping(item) for item in [*bad, *weights, *as_list(data.get("buffers"))]]
    rows.sort(key=lambda item: item.get("kind") != "loss")
    names = tuple(dict.fromkeys(as_text(item.get("name")) for item in rows))
    return Event(
        row=row,
        step=step,
        kind=kind,
        action=as_text(data.get("action")),
        nan_count=as_int(data.get("nan_count")) or 0,
        inf_count=as_int(data.get("inf_count")) or 0,
        rows=[_said(item) for item in rows[:MAX_ROWS]],
        names=names,
        total=len(names),
        origin=_origin(data.get("origin")),
        lines=_more(data, spike),
        spike=as_text(spike.get("what") or "norm") if spike else "",
        bad_loss=any(item.get("kind") == "loss" for item in rows),
    )


def _said(row: dict[str, Any]) -> str:
    shape = as_list(row.get("shape"))
    first = as_list(row.get("first_bad"))
    where = f", first at {first}" if row.get("first_bad") is not None else ""
    rank = "" if row.get("rank") is None else f", rank {as_text(row['rank'])}"
    what = as_text(row.get("kind")) or "tensor"
    return (
        f"{what} '{as_text(row.get('name'))}' {as_text(row.get('dtype'))} {shape}: "
        f"{as_text(row.get('nan_count'))} NaN, "
        f"{as_text(row.get('inf_count'))} Inf{where}{rank}"
    )


def _origin(value: Any) -> dict[str, Any]:
    data = as_mapping(value)
    if not data:
        return {}
    texts = {name: as_text(data.get(name)) for name in TEXTS}
    sides = {side: [_range(as_mapping(item)) for item in as_list(data.get(side))[:MAX_ROWS]] for side in SIDES}
    return {**texts, "line": as_int(data.get("line")), **sides}


def _range(item: dict[str, Any]) -> str:
    low, high = number(item.get("min")), number(item.get("max"))
    between = "" if low is None or high is None else f", {low:.6g} to {high:.6g}"
    bad = ""
    if item.get("nan_count") or item.get("inf_count"):
        bad = f", {as_text(item.get('nan_count'))} NaN, {as_text(item.get('inf_count'))} Inf"
    there = "" if item.get("value_at") is None else f", value there {as_text(item['value_at'])}"
    return (
        f"{as_text(item.get('name'))}: {as_text(item.get('dtype'))} {as_list(item.get('shape'))}{between}{bad}{there}"
    )


def _more(data: dict[str, Any], spike: dict[str, Any]) -> list[str]:
    lines = []
    if spike:
        numbers = {name: number(spike.get(name), finite=False) for name in ("value", "expected", "sigma", "limit")}
        shown = {name: "?" if value is None else f"{value:.6g}" for name, value in numbers.items()}
        lines.append(
            f"The {as_text(spike.get('what'))} {shown['value']} is a spike: {shown['sigma']} sigma above the "
            f"{shown['expected']} of its recent history (limit {shown['limit']}); "
            f"action: {as_text(spike.get('action'))}."
        )
    if data.get("scale_note"):
        lines.append(as_text(data["scale_note"]))
    if data.get("microbatch") is not None:
        lines.append(f"Micro-batch {as_text(data['microbatch'])} brought it.")
    if as_list(data.get("dropped")):
        lines.append(f"Micro-batches given up: {as_text(data['dropped'])}.")
    return lines
