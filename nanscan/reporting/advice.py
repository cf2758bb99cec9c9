"""What to do next, in a sentence or two: for a person who reads the report the morning after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanscan.reporting.events import Event
from nanscan.reporting.reading import Log, Run
from nanscan.reporting.values import as_int, as_mapping, as_text

__all__ = ["NO_END", "advice", "ending", "made"]

NO_END = "not in the log: still running, or killed"
TORCH = "nanscan.wrap(..., find_origin=True) names the line of code"
FOUND_NOTHING = (
    "find_origin was on and found no operation: look at what changes gradients after backward, such as hooks, "
    "and put nanscan.trace() around the whole step"
)
PADDLE = "paddle.set_flags({'FLAGS_check_nan_inf': 1}) lets Paddle name the operator"
MAX_ERROR = 200  # characters
OFTEN = 0.9  # of the steps: a limit that is reached so often sets the step size


def advice(log: Log, facts: dict[str, Any]) -> list[str]:
    """What to do next, the most urgent first.

    Args:
        log: as read.
        facts: its summary so far: `skipped_at_end`, `origins`, `offenders` and so on.
    """
    if not log.steps:
        return ["Give nanscan.wrap(..., log=...) this path and let it take a step, or give the path that it was given."]
    said = [*_weights(log), *_fault(log, facts), *_spikes(log, facts), *_refused(log), *_clipping(log, facts)]
    return said or ["Nothing to do."]


def ending(run: Run) -> str:
    """How a run's program ended, in a few words.

    >>> ending(Run()), ending(Run(notes={"end": [{"error": "TrainingDiverged: 20 skips"}]}))
    ('not in the log: still running, or killed', 'TrainingDiverged: 20 skips')
    """
    if run.end is None and run.back_to is not None:
        return f"went back to step {run.back_to:,}"
    if run.end is None:
        return NO_END
    error = as_text(run.end.get("error")).replace(": nanscan: ", ": ", 1)
    return "normally" if not error else error if len(error) <= MAX_ERROR else f"{error[:MAX_ERROR]} …"


def made(origin: dict[str, Any]) -> str:
    """What made a NaN, and where."""
    what = origin.get("op") or "?"
    came = f"{what} {origin.get('name') or ''}".strip() if what in ("input", "parameter") else what
    module = f" in {origin['module']}" if origin.get("module") else ""
    line = f":{origin['line']}" if origin.get("line") else ""
    return f"{came}{module}" + (f" ({origin['file']}{line})" if origin.get("file") else "")


def _weights(log: Log) -> list[str]:
    first = next((event for run in log.runs for event in run.events if event.kind == "weights"), None)
    if first is None:
        return []
    return [f"Don't use weights from step {first.step:,} on: they held NaN or Inf. {_back(log.runs, first.step)}"]


def _back(runs: Sequence[Run], before: int | None = None) -> str:
    """Which checkpoint to go back to."""
    saved = [note for note in runs[-1].notes["checkpoint"] if not note.get("error")]
    steps = [(as_int(note.get("step")), note) for note in saved]
    good = [(step, note) for step, note in steps if step is not None and (before is None or step <= before)]
    if not good:
        return ""
    step, note = good[-1]
    which = "" if before is None else " before"
    return f"The last checkpoint that was saved{which} is of step {step:,}: {as_text(note.get('path'))}."


def _fault(log: Log, facts: dict[str, Any]) -> list[str]:
    if not any(facts[name] for name in ("origins", "skipped_for_nan", "bad_but_stepped", "bad_weights")):
        return []
    said = _mend(facts) if facts["origins"] else _find(log, facts)
    back = _back(log.runs) if facts["skipped_at_end"] > 1 else ""
    return [*said, back] if back else said


def _find(log: Log, facts: dict[str, Any]) -> list[str]:
    return [f"Find out what makes the NaN or Inf: {_way(log)}.{_bad_loss(log) or _worst(facts['offenders'])}"]


def _bad_loss(log: Log) -> str:
    """What it says that the loss was bad as well whenever something was."""
    bad = [event for run in log.runs for event in run.events if event.names and event.kind != "weights"]
    if not bad or not all(event.bad_loss for event in bad):
        return ""
    return " The loss itself was NaN or Inf each time: the forward pass made it, or it came in with the batch."


def _worst(offenders: Sequence[dict[str, Any]]) -> str:
    """Which tensor was bad most often; where several were, which way the fault lies."""
    if not offenders:
        return ""
    worst = offenders[0]
    if not any(other["steps"] == worst["steps"] for other in offenders[1:]):
        return f" Most often bad: {worst['name']}."
    return (
        f" Most often bad: {worst['name']}, and others as often. The backward pass spreads a fault towards the input: "
        "look at the last layer of these and at what follows it, up to the loss."
    )


def _way(log: Log) -> str:
    """What names the operation, in the run that saw a NaN or Inf last."""
    run = next(run for run in reversed(log.runs) if any(event.kind != "spike" for event in run.events))
    guard = as_mapping(as_mapping(run.facts.get("settings")).get("guard"))
    if guard.get("find_origin") is True:
        return FOUND_NOTHING
    return PADDLE if "paddle" in as_mapping(run.facts.get("packages")) and "find_origin" not in guard else TORCH


def _mend(facts: dict[str, Any]) -> list[str]:
    worst = max(facts["origins"], key=lambda origin: origin["steps"])
    more = len(facts["origins"]) - 1
    others = f" {more} other origin{'s are' if more > 1 else ' is'} listed below." if more else ""
    hint = f": {worst['hint'].rstrip('.')}." if worst.get("hint") else "."
    before = "Before it is started again, mend" if facts["skipped_at_end"] > 1 else "Mend"
    return [f"{before} {made(worst)}{hint}{others}"]


def _spikes(log: Log, facts: dict[str, Any]) -> list[str]:
    if not facts["spikes"]:
        return []
    events: list[Event] = [event for run in log.runs for event in run.events if event.spike]
    steps = ", ".join(f"{event.step:,}" for event in events[:5]) + (" …" if len(events) > 5 else "")
    return [f"Look at the batches of the spikes, step{'' if len(events) == 1 else 's'} {steps}."]


def _refused(log: Log) -> list[str]:
    notes = log.runs[-1].notes["checkpoint"]
    if not notes or not notes[-1].get("error"):
        return []
    what = "refused" if notes[-1].get("refused") else "not written"
    return [f"The last checkpoint, of step {as_text(notes[-1].get('step'))}, was {what}. {_back(log.runs)}".rstrip()]


def _clipping(log: Log, facts: dict[str, Any]) -> list[str]:
    part = facts["clipped_steps"] / log.steps
    if part < OFTEN or log.steps < 100 or facts["norm"] is None:
        return []
    return [
        f"{part:.0%} of the steps were clipped: the limit sets the step size. "
        f"If that is not meant, raise it: half of the norms are above {facts['norm']['median']:.3g}."
    ]
