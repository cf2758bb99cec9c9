"""A value and the way to it, and what is wrong there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nanscan.pickling.naming import Step, render
from nanscan.pickling.problem import PickleProblem

__all__ = ["Finding", "Place"]

_NAMED = 3


@dataclass(slots=True, eq=False)  # two places are the same if they are one; the values' own __eq__ may do anything
class Place:
    """A value and how it was reached."""

    value: Any
    parent: Place | None = None
    steps: tuple[Step, ...] = ()
    depth: int = 0
    refused: bool = False  # inside of something that weights_only refuses as a whole
    made: int = 0  # how many of the values up to the root a reducer made for its answer only

    def child(self, value: Any, steps: tuple[Step, ...]) -> Place:
        """The place of a part."""
        made = self.made + (steps[0][0] == "text")
        return Place(value, self, steps, self.depth + 1, self.refused, made)

    def upwards(self) -> Iterator[Place]:
        """This place and those that it was reached through, up to the root."""
        place: Place | None = self
        while place is not None:
            yield place
            place = place.parent

    def path(self) -> list[Step]:
        """The steps from the root to here."""
        found: list[Step] = []
        for place in self.upwards():
            found += reversed(place.steps)
        return found[::-1]


@dataclass(slots=True, eq=False)
class Finding:
    """What is wrong at a place; `also` are other places of the same object."""

    place: Place
    type: str
    reason: str
    fix: str
    severity: str = "error"
    also: list[Place] = field(default_factory=list)

    def problem(self, name: str) -> PickleProblem:
        steps = self.place.path()
        paths = dict.fromkeys(render(name, place.path()) for place in [self.place, *self.also])
        others = list(paths)[1 : _NAMED + 1]
        more = len(paths) - 1 - len(others)
        also = f" (also at {', '.join(others)}{f' and {more} more places' if more else ''})" if others else ""
        return PickleProblem(
            render(name, steps),
            self.type,
            self.reason + also,
            self.fix,
            self.severity,
            tuple(steps),
            tuple(tuple(place.path()) for place in self.also),
        )
