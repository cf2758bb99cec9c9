"""What a log says in numbers and a sentence: for `--json`, for the head of the page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanscan.reporting.advice import advice, ending
from nanscan.reporting.events import Event
from nanscan.reporting.reading import Log, Run
from nanscan.reporting.values import as_text

__all__ = ["offenders", "origins", "summary", "verdict"]

MAX_OFFENDERS = 20


def summary(log: Log) -> dict[str, Any]:
    """All of it as plain data."""
    runs = log.runs
    events = [event for run in runs for event in run.events]
    skips = [event for event in events if event.kind == "skip"]
    facts = _facts(log, runs, events, skips)
    return {**facts, "advice": advice(log, facts)}


def _facts(log: Log, runs: list[Run], events: list[Event], skips: list[Event]) -> dict[str, Any]:
    checkpoints = [note for run in runs for note in run.notes["checkpoint"]]
    return {
        "path": str(Path(log.path).absolute()),
        "size": log.size,
        "runs": len(runs),
        "steps": log.steps,
        "first_step": runs[0].columns["step"][0] if log.steps else None,
        "last_step": runs[-1].last_step if log.steps else None,
        "seconds": _seconds(runs),
        "verdict": verdict(log),
        "ended": ending(runs[-1]) if runs else None,
        "skipped": sum(len(run.skipped) for run in runs),
        "first_skipped_step": skips[0].step if skips else None,
        "skipped_at_end": skipped_at_end(runs),
        "skipped_for_nan": sum(bool(event.names) or not event.spike for event in skips),
        "spikes": sum(bool(event.spike) for event in events),
        "bad_but_stepped": sum(event.kind == "bad" for event in events),
        "bad_weights": sum(event.kind == "weights" for event in events),
        "rollbacks": sum(len(run.notes["rollback"]) for run in runs),
        "checkpoints": {
            "saved": sum(not note.get("error") for note in checkpoints),
            "refused": sum(bool(note.get("refused")) for note in checkpoints),
            "failed": sum(bool(note.get("error")) and not note.get("refused") for note in checkpoints),
        },
        "norm": _numbers(runs, "norm"),
        "loss": _numbers(runs, "loss"),
        "clipped_steps": sum(map(_clipped, runs)),
        "offenders": offenders(events),
        "origins": origins(events),
        "environment": [run.facts for run in runs],
        "problems": log.problems,
    }


def verdict(log: Log) -> str:
    """One sentence: how the run was."""
    steps, skipped = log.steps, sum(len(run.skipped) for run in log.runs)
    if not steps:
        return "There is no step in this log."
    trouble = [f"{skipped:,} of {steps:,} steps {_were(skipped)} skipped"] if skipped else []
    events = [event for run in log.runs for event in run.events]
    stepped = sum(event.kind == "bad" for event in events)
    weights = [event for event in events if event.kind == "weights"]
    back = sum(len(run.notes["rollback"]) for run in log.runs)
    trouble += [f"{_steps(stepped)} {_were(stepped)} taken with a NaN or Inf"] if stepped else []
    trouble += [f"the weights held NaN or Inf after step {weights[0].step:,}"] if weights else []
    trouble += [f"{back:,} rollback{'' if back == 1 else 's'}"] if back else []
    failed = ending(log.runs[-1]) if log.runs[-1].end and log.runs[-1].end.get("error") else ""
    taken = f"all {steps:,} steps were taken" if steps > 1 else "its one step was taken"
    if not trouble and failed:
        return f"{taken[0].upper()}{taken[1:]}, then the program ended with {_kind(failed)}."
    if not trouble:
        return f"Healthy: {taken}."
    end = skipped_at_end(log.runs)
    at_end = [f"it ended with {end:,} skipped in a row" if end > 1 else "the last step was skipped"] if end else []
    at_end += [f"the program ended with {_kind(failed)}"] if failed else []
    text = "; ".join([*trouble, *at_end])
    return f"{text[0].upper()}{text[1:]}."


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def _kind(error: str) -> str:
    return error.partition(":")[0]


def skipped_at_end(runs: Sequence[Run]) -> int:
    """How many steps the last run has skipped in a row at its end."""
    skipped = set(runs[-1].skipped) if runs else set()
    row = runs[-1].steps - 1 if runs else -1
    count = 0
    while row - count in skipped:
        count += 1
    return count


def _clipped(run: Run) -> int:
    """How many steps were clipped and taken."""
    skipped = set(run.skipped)
    factors = enumerate(run.columns["clip_factor"])
    return sum(factor is not None and factor < 1 and row not in skipped for row, factor in factors)


def _seconds(runs: Sequence[Run]) -> float | None:
    spans = [
        times[-1] - times[0] for run in runs if len(times := [t for t in run.columns["time"] if t is not None]) > 1
    ]
    return round(sum(spans), 3) if spans else None


def _numbers(runs: Sequence[Run], name: str) -> dict[str, float] | None:
    values = [value for run in runs for value in run.columns[name] if value is not None]
    if not values:
        return None
    return {
        "first": values[0],
        "last": values[-1],
        "min": min(values),
        "median": statistics.median(values),
        "max": max(values),
    }


def offenders(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The tensors that were bad most often, each with how often, and where first and last."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        for name in event.names:
            entry = found.setdefault(name, {"name": name, "steps": 0, "first_step": event.step})
            entry["steps"] += 1
            entry["last_step"] = event.step
    return sorted(found.values(), key=lambda entry: -entry["steps"])[:MAX_OFFENDERS]


def origins(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Each place that made a NaN or Inf once, with how often and at which step first."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for event in events:
        if event.origin:
            key = tuple(as_text(event.origin.get(name)) for name in ("kind", "op", "module", "file", "line", "name"))
            entry = found.setdefault(key, {**event.origin, "steps": 0, "first_step": event.step})
            entry["steps"] += 1
    return list(found.values())
