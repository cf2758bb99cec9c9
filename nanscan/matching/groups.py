"""Which saved group's options (lr, betas, …) a group of the optimizer gets."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["matched_groups"]

_NO_OPTIONS = ("params", "param_names")
_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")  # what these put in


def matched_groups(
    own: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]], pairs: Mapping[int, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The optimizer's groups with the saved options, `params` being positions; and what should be known about it.

    Args:
        own: the optimizer's groups.
        saved: those of the state.
        pairs: position of a parameter -> the state's id of it.
    """
    group_of = {key: number for number, group in enumerate(saved) for key in group["params"]}
    groups: list[dict[str, Any]] = []
    notes: list[str] = []
    parts: dict[int, list[int]] = {}
    first = 0
    for number, group in enumerate(own):
        places = list(range(first, first + len(group["params"])))
        first += len(places)
        sources = Counter(group_of[pairs[place]] for place in places if place in pairs)
        if not sources and not places and len(own) == len(saved):
            sources[number] += 1
        if len(sources) == 1:
            parts.setdefault(next(iter(sources)), []).append(number)
        options = _merged(number, [saved[i] for i, _ in sources.most_common()], notes)
        if not sources:
            notes.append(f"group {number} keeps its options: none of its parameters is in the checkpoint")
        notes += _strangers(number, group, options)
        groups.append({**group, **{key: _like(value, group.get(key)) for key, value in options.items()}})
        groups[-1]["params"] = places
    for source, numbers in parts.items():
        notes += _levelled(numbers, [own[number] for number in numbers], saved[source])
    return groups, notes


def _levelled(numbers: Sequence[int], own: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]) -> list[str]:
    """Notes on options in which groups differ that were one group: all of them get its value."""
    notes = []
    for key in own[0].keys() & saved.keys() - {*_NO_OPTIONS, *_SCHEDULERS}:
        values = [group.get(key) for group in own]
        if any(not _same(values[0], value) for value in values[1:]):
            notes.append(
                f"groups {', '.join(map(str, numbers))} were one group in the checkpoint and get its {key} "
                f"({saved[key]!r}); made with {', '.join(map(repr, values))}: set it anew where the difference is meant"
            )
    return sorted(notes)


def _merged(number: int, sources: Sequence[Mapping[str, Any]], notes: list[str]) -> dict[str, Any]:
    """The options of the first of several saved groups; where they differ, that is noted."""
    if not sources:
        return {}
    chosen = {key: value for key, value in sources[0].items() if key not in _NO_OPTIONS}
    for key, value in chosen.items():
        others = [group.get(key) for group in sources[1:]]
        if any(not _same(value, other) for other in others):
            values = ", ".join(repr(item) for item in [value, *others])
            notes.append(f"group {number} was several groups with different {key} ({values}): the first is taken")
    return chosen


def _strangers(number: int, own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """A note where options are missing and others too many; a newer torch only adds some, a program too."""
    lacking = sorted(own.keys() - saved.keys() - {*_NO_OPTIONS, *_SCHEDULERS}) if saved else []
    strange = sorted(saved.keys() - own.keys() - {*_NO_OPTIONS, *_SCHEDULERS})
    if not lacking or not strange:
        return []
    return [
        f"group {number} has options of another kind of optimizer: the checkpoint has {', '.join(strange)}, and no "
        f"{', '.join(lacking)}"
    ]


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):  # tensors of several elements
        return isinstance(b, Tensor) and torch.equal(a, b)


def _like(value: Any, present: Any) -> Any:
    """An own copy of a saved option; where the group has a tensor (a captured learning rate), a tensor."""
    if not isinstance(present, Tensor):
        return copy.deepcopy(value)
    if isinstance(value, Tensor):
        return value.detach().clone().to(present.device)
    return torch.full_like(present, value) if isinstance(value, (int, float)) else copy.deepcopy(value)
