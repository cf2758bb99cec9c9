"""Classes that the tests of `find_unpicklable` share: each misbehaves in one way, and can be imported."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import threading
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset


class Box:
    """Holds whatever it is given, as attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


class SlottedAndMore(Slotted):
    def __init__(self, left: Any, right: Any, more: Any) -> None:
        super().__init__(left, right)
        self.more = more


@dataclasses.dataclass
class Config:
    fn: Any = None
    lr: float = 0.1


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    fn: Any = None


class Pair(NamedTuple):
    first: Any
    second: Any


class Members(list):
    pass


class Named(dict):
    pass


class Colour(enum.Enum):
    RED = 1


class Shade(enum.Enum):
    BAD = (lambda: 1,)


class Drops:
    """Leaves the lock out by itself."""

    def __init__(self) -> None:
        self.lock, self.kept = threading.Lock(), 3

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": self.kept}


class Renames:
    """Saves an attribute under another name."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getstate__(self) -> dict[str, Any]:
        return {"other": self.inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.inner = state["other"]


class Rebuilt:
    """Goes through its constructor."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __reduce__(self) -> Any:
        return Rebuilt, (self.inner,)


class Forgets:
    def __init__(self) -> None:
        self.counts = [1, 2]

    def __reduce__(self) -> Any:
        return Forgets, ()


class ForgetsWeights(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lock = threading.Lock()

    __reduce__ = lambda self: (ForgetsWeights, ())  # noqa: E731


class KeepsWeights(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def __reduce__(self) -> Any:
        return _restored, (self.state_dict(),)


def _restored(state: Any) -> KeepsWeights:
    new = KeepsWeights()
    new.load_state_dict(state)
    return new


class StateNone:
    def __init__(self) -> None:
        self.counts = [1, 2]

    def __getstate__(self) -> None:
        return None


class StateNumber:
    def __init__(self) -> None:
        self.counts = [1, 2]

    def __getstate__(self) -> Any:
        return 7


class SavingRaises:
    def __getstate__(self) -> Any:
        raise ValueError("not while training")


class SavingExits:
    def __reduce__(self) -> Any:
        raise SystemExit(3)


class BadMessage:
    def __getstate__(self) -> Any:
        class Unprintable(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        raise Unprintable


class LoadingRaises:
    def __init__(self) -> None:
        self.counts = [1, 2]

    def __setstate__(self, state: Any) -> None:
        raise KeyError("version")


class NeedsArgument:
    def __new__(cls, needed: Any) -> NeedsArgument:
        return object.__new__(cls)


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Proxy:
    """Delegates, and does not think of a time before `__init__`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class CarefulProxy(Proxy):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class AnswersAnything:
    def __init__(self) -> None:
        self.counts = [1]

    def __getattr__(self, name: str) -> Any:
        return None


class HashedByState:
    """Is a member of its own set, and hashed before its state is back."""

    def __init__(self) -> None:
        self.key = 3
        self.peers = {self}

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self is other


class ComparesAsTensor:
    """Compares as arrays do, and has code of its own that runs on loading."""

    def __init__(self) -> None:
        self.number = 1

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)

    def __eq__(self, other: object) -> Any:
        return torch.ones(3) == 1

    __hash__ = None  # type: ignore[assignment]


class SlotsCantBeSet:
    """An immutable class as people write it; pickle restores slots by `setattr`."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        object.__setattr__(self, "number", number)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("it is immutable")


class Untouchable:
    """Not even its class can be asked for."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"not to be touched: {name}")


class Hostile:
    """Raises whenever it is looked at, and pickles all the same."""

    def __refuse(self, *_: Any) -> Any:
        raise RuntimeError("do not look")

    __bool__ = __len__ = __eq__ = __ne__ = __repr__ = __str__ = __iter__ = __contains__ = __getitem__ = __refuse

    def __hash__(self) -> int:
        return 1


class Endless:
    def __reduce__(self) -> Any:
        return list, ([Endless()],)


class EndlessTree:
    def __reduce__(self) -> Any:
        return list, ([EndlessTree(), EndlessTree()],)


class Node:
    """Of a linked list."""

    def __init__(self) -> None:
        self.next: Any = None


class Methods:
    def method(self) -> int:
        return 1

    @classmethod
    def made(cls) -> int:
        return 1

    @staticmethod
    def static() -> int:
        return 1

    class Inner:
        pass


Wrong = collections.namedtuple("Right", "left right")


def _original() -> None:
    pass


replaced = _original


@functools.wraps(_original)
def _original(*_: Any) -> None:  # type: ignore[no-redef]
    pass


class Images(Dataset[torch.Tensor]):
    """A dataset that holds whatever it is given."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


def collate(batch: Any) -> Any:
    return batch
