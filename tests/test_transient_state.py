"""Named attributes are dropped on pickling and made anew; everything else survives, in every kind of class."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nanscan
from nanscan import TransientState
from nanscan.errors import CheckpointError


def _torch_save(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    **{
        f"pickle-{protocol}": lambda value, p=protocol: pickle.loads(pickle.dumps(value, p)) for protocol in range(2, 6)
    },  # type: ignore[misc]
    "python-pickle": lambda value: pickle._loads(pickle._dumps(value)),  # type: ignore[attr-defined]
    "deepcopy": copy.deepcopy,
    "torch.save": _torch_save,
}


@pytest.fixture(params=WAYS)
def again(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Every way to save and load, or to copy."""
    return WAYS[request.param]


RLock = type(threading.RLock())


class Cache(TransientState, transient={"lock": threading.RLock, "seen": lambda self: [0] * self.size, "last": None}):
    def __init__(self, size: int, weight: Any = None) -> None:
        self.size, self.weight = size, weight
        self.lock, self.seen, self.last = threading.RLock(), [7] * size, "last"


class Child(Cache, transient={"file": lambda self: f"open {self.path}", "last": lambda: "first"}):
    def __init__(self, path: str) -> None:
        super().__init__(3)
        self.path = path
        self.file = threading.Lock()


class GrandChild(Child):
    pass


class Private(TransientState, transient={"__lock": threading.RLock}):
    def __init__(self) -> None:
        self.__lock = threading.RLock()

    def lock(self) -> Any:
        return self.__lock


class Net(
    torch.nn.Module, TransientState, transient={"lock": threading.Lock, "mask": lambda: torch.ones(2), "tmp": None}
):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        self.lock = threading.Lock()
        self.register_buffer("mask", torch.zeros(2))
        self.register_buffer("steps", torch.tensor(5))
        self.tmp = torch.nn.Linear(1, 1)


@TransientState(lock=threading.Lock)
class DecoratedNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        self.lock = threading.Lock()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.restored = True


class Slots(TransientState, transient={"lock": threading.RLock}):
    __slots__ = ("lock", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.lock = value, threading.RLock()


class SlotsAndDict(Slots, transient={"extra": dict}):
    def __init__(self) -> None:
        super().__init__(1)
        self.extra, self.kept = threading.Lock(), 2


@dataclasses.dataclass
class Data(TransientState, transient={"lock": threading.RLock}):
    rate: float
    lock: Any = dataclasses.field(default_factory=threading.RLock, compare=False)
    note: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen(TransientState, transient={"lock": threading.RLock}):
    rate: float
    lock: Any = dataclasses.field(default_factory=threading.RLock, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots(TransientState, transient={"lock": threading.RLock}):
    rate: float
    lock: Any = dataclasses.field(default_factory=threading.RLock, compare=False)


@TransientState(lock=threading.RLock)
@dataclasses.dataclass(frozen=True, slots=True)
class DecoratedOutside:
    rate: float
    lock: Any = dataclasses.field(default_factory=threading.RLock, compare=False)


@dataclasses.dataclass(slots=True)
@TransientState(lock=threading.RLock)
class DecoratedInside:
    rate: float
    lock: Any = dataclasses.field(default_factory=threading.RLock, compare=False)


class OwnGetstate(TransientState, transient={"lock": threading.RLock}):
    def __init__(self) -> None:
        self.rate, self.lock = 0.5, threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "version": 2}


class OwnBoth(OwnGetstate):
    def __setstate__(self, state: dict[str, Any]) -> None:
        assert state.pop("version") == 2 and "lock" not in state
        self.__dict__.update(state)


class TupleState(TransientState, transient={"lock": threading.RLock}):
    def __init__(self) -> None:
        self.rate, self.lock = 0.5, threading.RLock()

    def __getstate__(self) -> Any:
        return self.rate, self.lock, None

    def __setstate__(self, state: Any) -> None:
        self.rate, self.lock, _ = state


class OwnReduce(TransientState, transient={"lock": threading.RLock}):
    def __init__(self, rate: float) -> None:
        self.rate, self.lock, self.more = rate, threading.RLock(), 1

    def __reduce__(self) -> Any:
        return type(self), (self.rate,), {"more": self.more, "lock": self.lock}


class ReduceWithoutState(TransientState, transient={"lock": threading.RLock, "made": lambda: "made"}):
    def __init__(self, rate: float) -> None:
        self.rate, self.lock = rate, threading.RLock()

    def __reduce__(self) -> Any:
        return type(self), (self.rate,)

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("pickle would not call it: there is no state")


class MakesItsOwn(TransientState, transient={"lock": lambda: "never"}):
    def __init__(self) -> None:
        self.lock, self.rate = threading.Lock(), 0.5

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock="own")


class SuperFirst(Cache):
    """Restores the base before what the base's function needs is there."""

    def __getstate__(self) -> Any:
        return {"size": self.size, "rest": {"weight": self.weight}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        size = state.pop("size")
        super().__setstate__(state) if hasattr(super(), "__setstate__") else self.__dict__.update(state)
        self.size = size
        self.weight = self.__dict__.pop("rest")["weight"]


class Table(TransientState, dict[str, int], transient={"lock": threading.RLock}):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = threading.RLock()


class Ordered(collections.OrderedDict[str, int], TransientState, transient={"lock": threading.RLock}):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = threading.RLock()


class Delegates(TransientState, transient={"lock": threading.RLock}):
    def __init__(self, inner: Any) -> None:
        self.inner, self.lock = inner, threading.RLock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)


class Default(TransientState, transient={"lock": threading.RLock}):
    lock: Any = None  # a default of the class is no value of the instance


class Fails(TransientState, transient={"file": lambda self: Path(self.path).read_text()}):
    def __init__(self) -> None:
        self.path, self.file = "/nowhere/at/all", None


@TransientState(lock=threading.RLock)
class Decorated:
    def __init__(self) -> None:
        self.lock, self.rate = threading.RLock(), 0.5


class DecoratedChild(Decorated):
    def __init__(self) -> None:
        super().__init__()
        self.child = 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def test_named_attributes_are_made_anew_and_the_rest_is_kept(again: Callable[[Any], Any]) -> None:
    cache = Cache(2, weight=torch.ones(2))
    loaded = again(cache)
    assert isinstance(loaded.lock, RLock) and loaded.lock is not cache.lock
    assert (loaded.size, loaded.seen, loaded.last) == (2, [0, 0], None)
    assert torch.equal(loaded.weight, torch.ones(2))
    assert (cache.seen, cache.last) == ([7, 7], "last")  # the original is untouched


@pytest.mark.parametrize("cls", [Child, GrandChild])
def test_a_child_adds_to_its_parents_names_and_may_replace_them(cls: type[Child], again: Callable[[Any], Any]) -> None:
    loaded = again(cls("p"))
    assert isinstance(loaded.lock, RLock) and type(loaded) is cls
    assert (loaded.seen, loaded.file, loaded.last, loaded.path) == ([0, 0, 0], "open p", "first", "p")


def test_private_names_are_spelt_as_in_the_class(again: Callable[[Any], Any]) -> None:
    assert isinstance(again(Private()).lock(), RLock)


def test_a_module_keeps_its_weights_and_loses_named_buffers_and_submodules(again: Callable[[Any], Any]) -> None:
    net = Net()
    loaded = again(net)
    assert torch.equal(loaded.fc.weight, net.fc.weight) and loaded.steps == 5
    assert torch.equal(loaded.mask, torch.ones(2)) and "mask" in dict(loaded.named_buffers())
    assert loaded.tmp is None and loaded.lock is not net.lock
    assert net.mask is not None and net.tmp is not None  # the original is untouched
    assert torch.equal(
        loaded(torch.ones(2)) if hasattr(loaded, "call") else loaded.fc(torch.ones(2)), net.fc(torch.ones(2))
    )


def test_a_modules_own_setstate_is_called(again: Callable[[Any], Any]) -> None:
    net = DecoratedNet()
    loaded = again(net)
    assert loaded.restored and torch.equal(loaded.fc.weight, net.fc.weight) and loaded.lock.acquire(blocking=False)


def test_slots(again: Callable[[Any], Any]) -> None:
    assert again(Slots([1])).value == [1] and isinstance(again(Slots(1)).lock, RLock)
    loaded = again(SlotsAndDict())
    assert (loaded.extra, loaded.kept, loaded.value) == ({}, 2, 1) and isinstance(loaded.lock, RLock)


@pytest.mark.parametrize("cls", [Data, Frozen, FrozenSlots, DecoratedOutside, DecoratedInside])
def test_dataclasses(cls: Any, again: Callable[[Any], Any]) -> None:
    value = cls(0.5)
    loaded = again(value)
    assert loaded == value and loaded.rate == 0.5 and isinstance(loaded.lock, RLock)
    assert loaded.lock is not value.lock


def test_own_getstate_and_setstate_cooperate(again: Callable[[Any], Any]) -> None:
    assert (again(OwnGetstate()).version, again(OwnGetstate()).rate) == (2, 0.5)
    for cls in (OwnGetstate, OwnBoth, TupleState):
        loaded = again(cls())
        assert loaded.rate == 0.5 and isinstance(loaded.lock, RLock), cls


def test_own_reduce_cooperates(again: Callable[[Any], Any]) -> None:
    value = OwnReduce(0.5)
    value.more = 9
    loaded = again(value)
    assert (loaded.rate, loaded.more) == (0.5, 9) and isinstance(loaded.lock, RLock)
    loaded = again(ReduceWithoutState(0.25))
    assert (loaded.rate, loaded.made) == (0.25, "made") and isinstance(loaded.lock, RLock)


def test_what_its_own_setstate_makes_is_kept(again: Callable[[Any], Any]) -> None:
    assert (again(MakesItsOwn()).lock, again(MakesItsOwn()).rate) == ("own", 0.5)


def test_attributes_are_made_after_the_whole_state_is_back(again: Callable[[Any], Any]) -> None:
    loaded = again(SuperFirst(4, weight=1))
    assert (loaded.seen, loaded.weight, loaded.size) == ([0] * 4, 1, 4)


@pytest.mark.parametrize("cls", [Table, Ordered])
def test_subclasses_of_dict_keep_their_items(cls: Any, again: Callable[[Any], Any]) -> None:
    loaded = again(cls({"a": 1}))
    assert dict(loaded) == {"a": 1} and isinstance(loaded.lock, RLock) and type(loaded) is cls


def test_a_class_that_delegates_unknown_names(again: Callable[[Any], Any]) -> None:
    loaded = again(Delegates([1, 2]))
    assert loaded.count(2) == 1 and isinstance(loaded.lock, RLock)


def test_an_attribute_that_is_absent_is_no_error(again: Callable[[Any], Any]) -> None:
    assert isinstance(again(Default()).lock, RLock)
    cache = Cache(1)
    del cache.lock
    assert isinstance(again(cache).lock, RLock)


def test_a_decorated_class_and_its_child(again: Callable[[Any], Any]) -> None:
    assert again(Decorated()).rate == 0.5 and isinstance(again(Decorated()).lock, RLock)
    assert again(DecoratedChild()).child == 1 and isinstance(again(DecoratedChild()).lock, RLock)


def test_shared_and_cyclic_references_survive(again: Callable[[Any], Any]) -> None:
    cache = Cache(1)
    cache.weight = [cache]
    loaded = again([cache, cache])
    assert loaded[0] is loaded[1] and loaded[0].weight[0] is loaded[0] and isinstance(loaded[0].lock, RLock)


def test_what_fails_to_be_made_names_attribute_class_and_cause(again: Callable[[Any], Any]) -> None:
    with pytest.raises(
        CheckpointError, match=r"transient attribute 'file' of Fails .*FileNotFoundError.*/nowhere"
    ) as caught:
        again(Fails())
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_shallow_copies_are_made_the_same_way() -> None:
    cache = Cache(1, weight=[1])
    copied = copy.copy(cache)
    assert copied.weight is cache.weight and copied.lock is not cache.lock


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("RLock", "'lock' of Bad: give a function or class that makes it, or None, not 'RLock'"),
        (lambda a, b: None, "'lock' of Bad: its function needs 2 arguments"),
    ],
)
def test_a_wrong_entry_is_refused_at_the_class(entry: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):

        class Bad(TransientState, transient={"lock": entry}):
            pass


def test_wrong_uses_are_refused_with_the_right_ones() -> None:
    with pytest.raises(TypeError, match="must map names"):

        class Bad(TransientState, transient=["lock"]):  # type: ignore[arg-type]
            pass

    for wrong in (lambda: TransientState(Cache), lambda: TransientState()):
        with pytest.raises(TypeError, match=r"@nanscan.TransientState\(lock=threading.RLock\)"):
            wrong()

    class Empty(TransientState):
        pass

    with pytest.raises(TypeError, match="takes no arguments"):
        Empty(1)


def test_it_reaches_a_started_process(tmp_path: Path) -> None:
    (tmp_path / "spawned.py").write_text(
        "import multiprocessing, threading\n"
        "from nanscan import TransientState\n"
        "class Cache(TransientState, transient={'lock': threading.RLock}):\n"
        "    def __init__(self): self.lock, self.size = threading.RLock(), 3\n"
        "def work(cache, queue):\n"
        "    with cache.lock: queue.put(cache.size)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=work, args=(Cache(), queue)); process.start()\n"
        "    print(queue.get(timeout=100)); process.join()\n"
    )
    done = subprocess.run([sys.executable, tmp_path / "spawned.py"], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr


def test_it_is_a_public_name() -> None:
    assert nanscan.TransientState is TransientState and "TransientState" in nanscan.__all__
