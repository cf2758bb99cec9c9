"""What a pickle needs on loading, and where in the saved object: found with stand-ins, so that no code runs."""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

from nanscan.pickling.naming import Step, item_step, render
from nanscan.pickling.safe_globals import python3_name

__all__ = ["Needs", "needs_of"]

_MAKERS = {"numpy.random._pickle.__randomstate_ctor": "numpy.random.mtrand.RandomState"}
_MOST = 1_000_000  # values looked at: a hostile file may hold any number
_Held = tuple[tuple[Step, ...], Any]


@dataclass
class Needs:
    """What loading a pickle takes.

    Attributes:
        places: `module.name` -> the path of its first use, for every name that is imported.
        unnamed: the same for classes that the pickle does not name, as their objects are made by a function: those of
            NumPy's dtypes.
        filled: those names whose objects get their items one by one, which torch's restricted loader does for plain
            containers only.
    """

    places: dict[str, str] = field(default_factory=dict)
    unnamed: dict[str, str] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)


def needs_of(stream: IO[bytes], root: str) -> Needs:
    """What loading a pickle takes; nothing is imported.

    >>> import fractions, io
    >>> data = pickle.dumps({"lr": [fractions.Fraction(1, 2)]})
    >>> needs_of(io.BytesIO(data), "state").places
    {'fractions.Fraction': 'state["lr"][0]'}
    """
    found = Needs()
    seen: dict[int, Any] = {}
    queue: deque[_Held] = deque([((), _StandInUnpickler(stream, encoding="latin-1").load())])
    while queue and len(seen) < _MOST:
        steps, value = queue.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        name = value.name if isinstance(value, _Made) else getattr(value, "_stands_for", None)
        if name is not None:
            found.places.setdefault(name, render(root, steps))
        if isinstance(value, _Made):
            _note_made(found, value, render(root, steps))
        queue.extend((steps + more, held) for more, held in _parts(value))
    return found


def _note_made(found: Needs, made: _Made, path: str) -> None:
    if made.members or made.pairs:
        found.filled.add(made.name)
    if made.name in _MAKERS:
        found.unnamed.setdefault(_MAKERS[made.name], path)
    if made.name == "numpy.dtype" and made.given and isinstance(made.given[0], str):
        try:
            kind = type(np.dtype(made.given[0]))
        except (TypeError, ValueError):
            return
        found.unnamed.setdefault(f"{kind.__module__}.{kind.__qualname__}", path)


class _Made:
    """Stands for what calling an imported name would make."""

    _stands_for: str

    name: str
    given: list[Any]
    members: list[Any]
    pairs: list[tuple[Any, Any]]

    def __new__(cls, *args: Any, **options: Any) -> _Made:  # the only method that every way of making one comes by
        made = object.__new__(cls)
        made.name = cls._stands_for
        made.given, made.members, made.pairs = [*args, *options.values()], [], []
        return made

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.given.append(state)

    def append(self, member: Any) -> None:
        self.members.append(member)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))


class _StandInUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        path = ".".join(python3_name(module, name))
        if path == "collections.OrderedDict":
            return OrderedDict
        return type("StandIn", (_Made,), {"_stands_for": path})

    def persistent_load(self, key: Any) -> Any:
        return None


def _parts(value: Any) -> Iterator[_Held]:
    if isinstance(value, dict):
        for position, (key, held) in enumerate(list(dict.items(value))):
            yield (("key", position),), key
            yield (item_step(key, position),), held
    elif isinstance(value, (list, tuple, set, frozenset)):
        for position, held in enumerate(list(value)):
            yield (("item", position),), held
    elif isinstance(value, _Made):
        yield from _parts_of_made(value)


def _parts_of_made(made: _Made) -> Iterator[_Held]:
    """What a stand-in was given; attributes by name, arguments under the path of what they make."""
    for given in made.given:
        if isinstance(given, dict):
            yield from (((("attr", key),), held) for key, held in given.items())
        else:
            yield (), given
    yield from (((("item", position),), held) for position, held in enumerate(made.members))
    for position, (key, held) in enumerate(made.pairs):
        yield (item_step(key, position),), held
