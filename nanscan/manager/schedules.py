"""Is the scheduler that is restored the one that was saved? Its `load_state_dict` takes over whatever it is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nanscan import messages
from nanscan.errors import CheckpointWarning

__all__ = ["compare_scheduler", "quoted"]

# What the program chooses and no step changes; learning rates are not among them: Recovery lowers those on purpose.
_SETTINGS = (
    "T_max", "T_0", "T_mult", "step_size", "gamma", "milestones", "_milestones", "total_iters", "total_steps", "power",
    "factor", "patience", "cooldown", "threshold", "start_factor", "end_factor", "mode", "total_size", "step_ratio",
    "anneal_epochs",
)  # fmt: skip


def compare_scheduler(scheduler: Any, own: Any, saved: Any) -> None:
    """Warn where the saved state is of another kind of scheduler, or of one that was built with other settings.

    Args:
        scheduler: that will be given the state.
        own: its state as it was built.
        saved: the checkpoint's.
    """
    if not isinstance(own, Mapping) or not isinstance(saved, Mapping):
        return
    if own.keys() != saved.keys():
        messages.warn(
            "nanscan: the state of the scheduler seems to be that of another kind than "
            f"{type(scheduler).__name__}: it has {quoted(saved.keys() - own.keys())} and lacks "
            f"{quoted(own.keys() - saved.keys())}",
            CheckpointWarning,
        )
        return
    changed = list(_changed(own, saved, "scheduler"))
    if changed:
        messages.warn(
            f"nanscan: {'; '.join(changed)}: the checkpoint's hold from now on. If the new ones are meant, restore "
            "without the scheduler; then set each group's lr to its initial_lr, make the scheduler, and step it as "
            "often as it was stepped before",
            CheckpointWarning,
        )


def _changed(own: Mapping[str, Any], saved: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in _SETTINGS:
        if name in own and name in saved and own[name] != saved[name]:
            yield f"{path} was built with {name}={own[name]!r}, the checkpoint has {name}={saved[name]!r}"
    ours, theirs = own.get("_schedulers"), saved.get("_schedulers")
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            yield f"{path} was built of {len(ours)} schedulers, the checkpoint has {len(theirs)}"
        for position, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            if isinstance(mine, Mapping) and isinstance(other, Mapping):
                yield from _changed(mine, other, f"{path}._schedulers[{position}]")


def quoted(names: Any) -> str:
    """Names in order, as text."""
    return ", ".join(sorted(map(repr, names))) or "nothing"
