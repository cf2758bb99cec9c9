"""Objects that are nested too deep for pickle, which goes down one level of recursion for each of theirs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from nanscan.pickling.naming import type_name
from nanscan.pickling.parts import ATOMS
from nanscan.pickling.places import Finding, Place
from nanscan.pickling.walk import Walk

__all__ = ["too_deep"]


def too_deep(root: Place, for_process: bool, skipped: frozenset[int]) -> Finding:
    """The place from which on the nesting goes down, told with its depth. Pickle's own order: depth first."""
    walk = Walk(for_process)
    deepest = root
    seen: dict[int, Any] = {}
    stack = [deepest]
    while stack:
        place = stack.pop()
        if id(place.value) in seen or id(place.value) in skipped:
            continue
        seen[id(place.value)] = place.value
        deepest = place if place.depth > deepest.depth else deepest
        below = [place.child(held, steps) for steps, held in walk.children(place) if type(held) not in ATOMS]
        stack.extend(reversed(below))
    return _told(deepest)


def _told(deepest: Place) -> Finding:
    chain = list(deepest.upwards())[::-1]
    repeated = Counter(type(place.value) for place in chain).most_common(1)[0][0]
    start = next(place for place in chain if type(place.value) is repeated)
    return Finding(
        start,
        type_name(start.value),
        f"it is nested {deepest.depth} levels deep and pickle recurses once for each: RecursionError (deepcopy too)",
        "keep it flat: a list of nodes with indices instead of references, or drop the references in __getstate__",
    )
