"""What a pickle describes, as inert data: nothing here is ever imported, called or hashed."""

from __future__ import annotations

from typing import Any, NamedTuple

from nanscan.files.source import Source

__all__ = ["Blob", "Dict", "Global", "Object", "Persistent", "Set"]


class Global(NamedTuple):
    """A name that unpickling would import."""

    module: str
    name: str

    @property
    def full(self) -> str:
        """``module.name``."""
        return f"{self.module}.{self.name}"


class Blob(NamedTuple):
    """A long byte string (or text, in UTF-8) that stays in the file."""

    source: Source
    start: int
    size: int
    text: bool


class Persistent(NamedTuple):
    """A reference to something outside the pickle; PyTorch's storages."""

    key: Any


class Dict:
    """A dict as pairs: keys are not hashed, so that no key can keep its reader busy."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    def get(self, key: str) -> Any:
        """The last value under a text key; None if there is none."""
        return next((value for name, value in reversed(self.pairs) if type(name) is str and name == key), None)


class Set:
    """A set or frozenset as a list."""

    __slots__ = ("items",)

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class Object:
    """What unpickling would make by calling ``function`` with ``args``, then fill with state and items."""

    __slots__ = ("args", "function", "items", "kwargs", "new", "pairs", "state")

    def __init__(self, function: Any, args: Any, *, new: bool = False, kwargs: Any = None) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.new = new  # made by the class's __new__, not by a call
        self.state: Any = None
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []

    @property
    def called(self) -> str:
        """The full name of what would be called; "" if it is not a plain name."""
        return self.function.full if isinstance(self.function, Global) else ""
