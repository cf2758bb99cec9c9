"""What a guarded optimizer remembers, as plain data: counters, the history of its adaptive clip, that of spikes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanscan import messages
from nanscan.clipping.checked_state import count_of

if TYPE_CHECKING:
    from nanscan.steps import GuardedSteps

__all__ = ["guard_state", "load_guard_state"]

FORMAT = "nanscan-guard"
VERSION = 1
COUNTERS = ("steps", "skipped", "consecutive", "first_skipped", "bad_parameter_steps", "spikes", "dropped")


def guard_state(guard: GuardedSteps) -> dict[str, Any]:
    """The state of a guarded optimizer; see `GuardedOptimizer.guard_state_dict`."""
    guard._settle(wait=True)
    limits = {"clip": None, "spikes": None} if guard._limits is None else guard._limits.state()
    counters = {name: getattr(guard._record, name) for name in COUNTERS}
    return {"format": FORMAT, "version": VERSION, "counters": counters, **limits}


def load_guard_state(guard: GuardedSteps, state: Any) -> None:
    """The inverse of `guard_state`: everything or, after an exception, nothing.

    Raises:
        TypeError: if `state` is no dict.
        ValueError: if it is not such a state, of a newer version, or of another rule.
    """
    counters = _counters(state)
    guard._settle(wait=True)
    if guard._limits is not None:
        try:
            guard._limits.load(state)
        except ValueError as error:
            raise ValueError(f"the guard state can't be loaded, nothing was changed: {error}") from None
    unused = [name for name in ("clip", "spikes") if state.get(name) is not None and not _wanted(guard, name)]
    if unused:
        messages.warn(
            f"nanscan: the guard state holds {' and '.join(unused)}, which this optimizer does not use: it was wrapped "
            "without that option of nanscan.wrap (clip_norm=AdaptiveClip(...), on_spike=...)",
            UserWarning,
        )
    for name, value in counters.items():
        setattr(guard._record, name, value)
    guard._steps = guard._record.steps


def _counters(state: Any) -> dict[str, int | None]:
    """The counters in a state that is sound so far."""
    if not isinstance(state, Mapping):
        raise TypeError(f"the guard state must be a dict from guard_state_dict(), got {type(state).__name__}")
    counters = state.get("counters")
    if state.get("format") != FORMAT or not isinstance(counters, Mapping):
        keys = ", ".join(map(str, list(state)[:6])) or "none"
        raise ValueError(f"this is no guard state from guard_state_dict(): its keys are {keys}")
    if state.get("version") != VERSION:
        raise ValueError(
            f"the guard state is of version {state.get('version')!r}, this nanscan reads version {VERSION}: update it"
        )
    for part in ("clip", "spikes"):
        if state.get(part) is not None and not isinstance(state[part], Mapping):
            raise ValueError(f"the guard state's {part} must be a dict or None, got {type(state[part]).__name__}")
    known = [name for name in COUNTERS if name in counters]
    first = "first_skipped"
    return {n: None if n == first and counters[n] is None else count_of(counters, n) for n in known}


def _wanted(guard: GuardedSteps, name: str) -> bool:
    limits = guard._limits
    return limits is not None and (limits.rule if name == "clip" else limits.spikes) is not None
