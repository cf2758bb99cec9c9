"""`load_optimizer_state`: an optimizer's state from a checkpoint, matched by the parameters' names, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nanscan import messages
from nanscan.errors import CheckpointError, CheckpointWarning
from nanscan.guard import GuardedOptimizer
from nanscan.matching.given import checked_optimizer_state
from nanscan.matching.groups import matched_groups
from nanscan.matching.keys import pair, renamings
from nanscan.matching.own_names import OwnNames, are_positions, saved_names
from nanscan.matching.report import MatchReport, Mismatch
from nanscan.matching.restore import put_state
from nanscan.matching.shapes import mismatches

__all__ = ["load_optimizer_state", "optimizer_names"]


def optimizer_names(optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> list[list[str]]:
    """The names of an optimizer's parameters, group by group; to be stored beside its state.

    Args:
        optimizer: guarded or not.
        model: where names come from. None: a guarded optimizer's model, else the optimizer's named groups, else the
            position: `"group0.param3"`.

    >>> model = nn.Linear(2, 1)
    >>> optimizer_names(torch.optim.SGD(model.parameters(), lr=0.1), model)
    [['weight', 'bias']]
    """
    return OwnNames(optimizer, model).by_group


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    model: nn.Module | None = None,
    names: Sequence[Sequence[str]] | None = None,
    strict: bool = True,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> MatchReport:
    """Load an optimizer's state; parameters are matched by name, so their order and grouping may have changed.

    Shapes are checked, which `Optimizer.load_state_dict` does not do. State is taken bit for bit, also where torch
    would round it: a float32 moment of a bfloat16 parameter stays float32. Only if a parameter has another dtype now
    do the moments that had its former one follow it. `step` stays on the CPU unless the group is capturable or fused.
    Group options (lr, betas, …) are restored: a group gets those of the saved group that its parameters were in.
    Everything is copied: `state` is neither changed nor shared.

    Args:
        optimizer: what to load into; guarded or not.
        state: as `optimizer.state_dict()` gives it.
        model: gives the parameters their names; not needed for a guarded optimizer that has a model, nor for one with
            named groups.
        names: the names at the time of saving, as `optimizer_names` gave them. None: those in the state's groups
            (`param_names`). Where names are unknown on either side, parameters are matched by position, if groups are
            as long as they were and shapes fit.
        strict: True: a parameter that is on one side only, or has a state of another shape, is an error and nothing is
            changed. False: what matches is loaded, and a `CheckpointWarning` has the name of all that doesn't.
        dtypes: name -> the parameter's dtype at the time of saving, as in the model's saved state. Where it is
            unknown, moments narrower than their parameter follow it and wider ones stay.

    Returns:
        What was matched, by the parameters' names.

    Raises:
        CheckpointError: something doesn't match, or with `strict=False` nothing does; the optimizer is as it was.
        TypeError: `state` is no dict.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1, momentum=0.9)
    >>> model(torch.ones(1, 2)).sum().backward(); optimizer.step()
    >>> saved, names = optimizer.state_dict(), optimizer_names(optimizer, model)
    >>> other = torch.optim.SGD([model.bias, model.weight], lr=0.5, momentum=0.9)
    >>> load_optimizer_state(other, saved, model=model, names=names).complete, other.param_groups[0]["lr"]
    (True, 0.1)
    """
    saved = checked_optimizer_state(state)
    own = OwnNames(optimizer, model)
    found = _matched(own, saved, names, model)
    report = _report(own, saved, found)
    bad = {item.name for item in report.mismatched}
    pairs = {place: key for place, key in found.pairs.items() if own.flat[place] not in bad}
    groups, notes = matched_groups(own.groups, saved["param_groups"], pairs)
    _judge(replace(report, notes=(*report.notes, *notes)), strict, bool(own.flat or found.names))
    inner = optimizer.optimizer if isinstance(optimizer, GuardedOptimizer) else optimizer
    former = {
        place: known for place, key in pairs.items() if (known := (dtypes or {}).get(found.names[key])) is not None
    }
    put_state(inner, saved, groups, pairs, former)
    return report


@dataclass(frozen=True)
class _Match:
    """`pairs`: own position -> the state's id of the parameter; `names`: id -> name at the time of saving."""

    pairs: dict[int, Any]
    names: dict[Any, str]


def _matched(
    own: OwnNames, saved: Mapping[str, Any], given: Sequence[Sequence[str]] | None, model: nn.Module | None
) -> _Match:
    ids = [key for group in saved["param_groups"] for key in group["params"]]
    names = saved_names(saved["param_groups"], given)
    if names is None or are_positions(names) or are_positions(own.flat):
        if model is not None and names is not None and not are_positions(names):  # the order is known to mean nothing
            raise CheckpointError(
                f"the {type(model).__name__} given as model= has none of the optimizer's parameters: give the model "
                "that the optimizer was made of; nothing was loaded"
            )
        return _by_position(own, saved["param_groups"], names or own.flat)
    pairs = pair(names, [name for several in own.all for name in several])
    place_of = {name: place for place, several in enumerate(own.all) for name in several}
    id_of = dict(zip(names, ids, strict=True))
    found: dict[int, Any] = {}
    for name, key in pairs.items():  # of a tied parameter's names, the first that is known
        found.setdefault(place_of[name], id_of[key])
    return _Match(found, dict(zip(ids, names, strict=True)))


def _by_position(own: OwnNames, groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> _Match:
    ours, theirs = [len(group["params"]) for group in own.groups], [len(group["params"]) for group in groups]
    if ours != theirs:
        raise CheckpointError(
            "this state can't be matched to the optimizer by position, and names are not known on both sides: it has "
            f"{_counts(theirs)}, the optimizer {_counts(ours)}. Give model= for the optimizer's names, and names=, "
            "stored at the time of saving from nanscan.matching.optimizer_names(optimizer, model); nothing was loaded"
        )
    ids = [key for group in groups for key in group["params"]]
    return _Match(dict(enumerate(ids)), dict(zip(ids, names, strict=True)))


def _counts(lengths: list[int]) -> str:
    return f"{len(lengths)} group{'s' * (len(lengths) != 1)} of {', '.join(map(str, lengths)) or 'no'} parameters"


def _report(own: OwnNames, saved: Mapping[str, Any], found: _Match) -> MatchReport:
    bad = [Mismatch(own.flat[place], reason) for place, reason in mismatches(own.params, saved, found.pairs)]
    names = {item.name for item in bad}
    used = set(found.pairs.values())
    missing = [name for place, name in enumerate(own.flat) if place not in found.pairs]
    unexpected = [name for key, name in found.names.items() if key not in used]
    adapted = [
        (found.names[key], own.flat[place])
        for place, key in found.pairs.items()
        if found.names[key] not in own.all[place] and own.flat[place] not in names
    ]
    hints = renamings(missing, unexpected, {})
    return MatchReport(
        "optimizer",
        loaded=tuple(name for place, name in enumerate(own.flat) if place in found.pairs and name not in names),
        adapted=tuple(adapted),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        mismatched=tuple(bad),
        notes=tuple(f"renamed? the model's '{name}' may be the checkpoint's '{other}'" for name, other in hints),
    )


def _judge(report: MatchReport, strict: bool, expected: bool) -> None:
    """Raise if this must not be loaded, else warn of what is not."""
    nothing = expected and not report.loaded
    if nothing or (strict and not report.complete):
        first = "no parameter of this state matches" if nothing else "this state does not match"
        advice = "Is it the state of another model's optimizer?" if nothing else "strict=False loads what matches."
        raise CheckpointError(
            "\n  ".join([f"{first} the optimizer; nothing was loaded", *report.differences(), advice])
        )
    if lines := report.differences():
        messages.warn("nanscan: the checkpoint and the optimizer differ: " + "; ".join(lines), CheckpointWarning)
