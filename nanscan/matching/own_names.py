"""What an optimizer's parameters are called now, and what they were called when its state was saved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanscan.errors import CheckpointError
from nanscan.guard import GuardedOptimizer
from nanscan.names import names_of

__all__ = ["OwnNames", "are_positions", "saved_names"]

_POSITION = re.compile(r"group\d+\.param\d+")


class OwnNames:
    """The parameters of an optimizer and their names, in the order of its groups.

    Args:
        optimizer: guarded or not.
        model: gives the names; None: a guarded optimizer's model, else its named groups, else the positions.

    Attributes:
        groups: its live groups.
        params: every parameter.
        all: the names of each; a tied one has several.
        flat: the first name of each.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
        guarded = optimizer if isinstance(optimizer, GuardedOptimizer) else None
        self.groups: list[dict[str, Any]] = optimizer.param_groups
        self.params: list[Tensor] = [p for group in self.groups for p in group["params"]]
        if guarded is not None and (model is None or model is guarded.model):
            self.all = guarded._names.known(self.groups)
        else:
            self.all = self._named(names_of(model))
        self.flat = [names[0] for names in self.all]

    def _named(self, known: Mapping[int, tuple[str, ...]]) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = []
        for number, group in enumerate(self.groups):
            own = group.get("param_names") or [f"group{number}.param{i}" for i in range(len(group["params"]))]
            found += (known.get(id(p)) or (name,) for p, name in zip(group["params"], own, strict=True))
        return found

    @property
    def by_group(self) -> list[list[str]]:
        """The first name of each parameter, group by group."""
        names = iter(self.flat)
        return [[next(names) for _ in group["params"]] for group in self.groups]


def are_positions(names: Sequence[str]) -> bool:
    """True if these say no more than where a parameter stood: nothing can be matched by them but the position.

    >>> are_positions(["group0.param0"]), are_positions(["weight"])
    (True, False)
    """
    return all(_POSITION.fullmatch(name) for name in names)


def saved_names(groups: Sequence[Mapping[str, Any]], given: Sequence[Sequence[str]] | None) -> list[str] | None:
    """The name of every parameter of a saved state, in order; None if it is not known.

    Args:
        groups: the state's `param_groups`.
        given: the names of each group as they were stored beside the state; else those in the groups are taken.

    Raises:
        CheckpointError: `given` does not fit the groups.
    """
    counts = [len(group["params"]) for group in groups]
    if given is not None:
        if [len(names) for names in given] != counts:
            raise CheckpointError(
                f"names= does not fit this state: it has names for groups of {[len(names) for names in given]} "
                f"parameters, the state has groups of {counts}; give what optimizer_names returned when it was saved"
            )
        return [str(name) for names in given for name in names]
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        return [key for group in groups for key in group["params"]]  # as torch.distributed.checkpoint writes it
    if any(len(group.get("param_names") or ()) != count for group, count in zip(groups, counts, strict=True)):
        return None
    return [str(name) for group in groups for name in group.get("param_names") or ()]
