"""Each message on docs/cannot_pickle.md is one that Python or PyTorch really raises, and nanscan names its place."""

from __future__ import annotations

import argparse
import copy
import io
import os
import pickle
import re
import socket
import sqlite3
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

import nanscan
from nanscan.pickling.stream import inspect_pickle

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cannot_pickle.md"
HEADINGS = re.findall("`([^`]+)`", "".join(re.findall(r"^### .*", PAGE.read_text(), re.MULTILINE)))
NEWER = {  # what later releases of Python say in place of it
    "Can't pickle local object '…'": "Can't get local object '…'",
    "cannot pickle '_io.TextIOWrapper' object": "cannot pickle 'TextIOWrapper' instances",
}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4096\n"


def says(error: BaseException, heading: str) -> bool:
    """Whether the error is the one of that heading, which is on the page."""
    messages = [heading, NEWER.get(heading, heading)]
    text = " ".join(str(error).split())
    patterns = [re.escape(message).replace("…", ".*") for message in messages]
    return {*messages} <= {*HEADINGS} and any(re.search(pattern, text) for pattern in patterns)


class Proxy:
    """Delegates what it lacks, also while it is empty."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def local_function() -> Callable[[object], object]:
    def scale(value: object) -> object:
        return value

    return scale


def there_and_back(part: object) -> object:
    return pickle.loads(pickle.dumps(part))


class Needy(Exception):
    """Its class asks for more than what `args` keeps."""

    def __init__(self, path: str, index: int) -> None:
        super().__init__(f"{path}, sample {index}")


NAMELESS: Any = types.FunctionType((lambda value: value).__code__, {"__name__": "argparse"})  # of that module


class Reloaded:
    """Has a name that another class takes."""


def of_a_replaced_class() -> object:
    old = type("Reloaded", (), {"__module__": __name__})
    return old()


def opened() -> object:
    return open(os.devnull)


def opened_hdf5() -> object:
    return h5py.File("in memory", "w", driver="core", backing_store=False)


@dataclass(frozen=True)
class Unsaved:
    """Something that does not pickle: how it is made, what fails, what Python says, and what nanscan says of it."""

    heading: str
    make: Callable[[], object]
    says: str
    fails: Callable[[object], object] = pickle.dumps
    severity: str = "error"


UNSAVED = [
    Unsaved("cannot pickle '_thread.RLock' object", threading.RLock, "a lock belongs to"),
    Unsaved("cannot pickle '_thread.lock' object", threading.Lock, "a lock belongs to"),
    Unsaved("cannot pickle '_thread._local' object", threading.local, "thread-local data belongs to"),
    Unsaved(
        "Can't pickle <function <lambda> at …>: attribute lookup <lambda> on … failed",
        lambda: NAMELESS,
        "a lambda defined at",
    ),
    Unsaved("Can't pickle local object '…'", local_function, "'scale' is a local function"),
    Unsaved(
        "Can't pickle <class '…'>: it's not the same object as …", of_a_replaced_class, "it was replaced, reloaded"
    ),
    Unsaved("cannot pickle 'generator' object", lambda: (number for number in range(3)), "position in running code"),
    Unsaved("cannot pickle '_io.TextIOWrapper' object", opened, "an open file is a handle"),
    Unsaved("h5py objects cannot be pickled", opened_hdf5, "an open file is a handle"),
    Unsaved("cannot pickle 'module' object", lambda: os, "a module can't be pickled"),
    Unsaved("cannot pickle 'socket' object", socket.socket, "a connection is a handle"),
    Unsaved(
        "cannot pickle 'sqlite3.Connection' object", lambda: sqlite3.connect(":memory:"), "a database connection is"
    ),
    Unsaved("cannot pickle 'weakref.ReferenceType' object", lambda: weakref.ref(Proxy), "a weak reference means"),
    Unsaved("cannot pickle 'dict_keys' object", lambda: {"a": 1}.keys(), "a view of another object"),
    Unsaved("cannot pickle 'mappingproxy' object", lambda: vars(Proxy), "a view of another object"),
    Unsaved("cannot pickle 'torch.Stream' object", lambda: torch.Stream(device="cpu"), "a handle of the device"),
    Unsaved("cannot pickle 'torch.Event' object", lambda: torch.Event("cpu"), "a handle of the device"),
    Unsaved(
        "('{} cannot be pickled', '_SingleProcessDataLoaderIter')",
        lambda: iter(DataLoader([1, 2])),
        "position in running code",
    ),
    Unsaved(
        "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol",
        lambda: nn.Linear(2, 2)(torch.ones(1, 2)),
        "part of a graph (grad_fn AddmmBackward0)",
        copy.deepcopy,
        "loss",
    ),
    Unsaved(
        "Serialization of parametrized modules is only supported through state_dict()",
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        "saving it raises RuntimeError",
    ),
    Unsaved(
        "Tried to serialize object … which does not have a __getstate__ method defined!",
        lambda: torch.jit.script(nn.ReLU()),
        "a compiled TorchScript object",
    ),
    Unsaved(
        "__init__() missing 1 required positional argument: '…'",
        lambda: Needy("a.npz", 3),
        "its class can't be called to restore it",
        there_and_back,
    ),
    Unsaved("maximum recursion depth exceeded", lambda: Proxy([1]), "recursion in __getattr__", there_and_back),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("case", UNSAVED, ids=lambda case: case.heading)
def test_the_error_is_real_and_its_place_is_named(case: Unsaved) -> None:
    model = nn.Linear(1, 1)
    model.part = case.make()
    with pytest.raises(Exception) as raised:
        case.fails(model)
    assert says(raised.value, case.heading)
    (problem,) = nanscan.find_unpicklable(model)
    assert (problem.path, problem.severity) == ("model.part", case.severity)
    assert case.says in problem.reason
    inner = isinstance(model.part, nn.Module)
    assert ("holds its tensors" in problem.fix) == inner


def test_a_writer_is_named_where_pickle_only_speaks_of_its_lock(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.writer = SummaryWriter(str(tmp_path))
    with pytest.raises(TypeError, match="cannot pickle '_thread.lock' object"):
        pickle.dumps(model)
    (problem,) = nanscan.find_unpicklable(model)
    assert problem.path == "model.writer" and "a writer holds threads" in problem.reason
    model.writer.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loader_is_judged_without_starting_its_workers() -> None:
    loader = DataLoader([1, 2], num_workers=1, collate_fn=local_function(), multiprocessing_context="spawn")
    with pytest.raises(AttributeError) as raised:
        next(iter(loader))
    assert says(raised.value, "Can't pickle local object '…'")
    (problem,) = nanscan.find_unpicklable(loader)
    assert problem.path == "loader.collate_fn" and "fails with spawn and forkserver" in problem.reason


@dataclass(frozen=True)
class Unloaded:
    """A file that does not load: its bytes, how it is read, and what nanscan says of it."""

    heading: str
    content: bytes
    says: str
    read: Callable[[Path], object] = torch.load


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpickled(path: Path) -> object:
    return pickle.loads(path.read_bytes())


def trusted(path: Path) -> object:
    return torch.load(path, weights_only=False)


SMALL, LARGE = saved(torch.ones(4096)), saved(torch.ones(400_000))
UNLOADED = [
    Unloaded(
        "Weights only load failed",
        saved({"args": argparse.Namespace(lr=0.1)}),
        'holds argparse.Namespace (at state["args"]), which weights_only=True refuses',
    ),
    Unloaded(
        "Unsupported global: GLOBAL … was not an allowed global by default",
        saved({"args": argparse.Namespace(lr=0.1)}),
        "torch.serialization.add_safe_globals([argparse.Namespace])",
    ),
    Unloaded("invalid load key, '…'.", LFS, "it is a Git LFS pointer", trusted),
    Unloaded("Unsupported operand …", b"<!DOCTYPE html><html>", "it is a web page"),
    Unloaded(
        "PytorchStreamReader failed reading zip archive: failed finding central directory",
        LARGE[: len(LARGE) // 2],
        "is corrupt: the end of the archive is missing",
    ),
    Unloaded("[Errno 22] Invalid argument", SMALL[: len(SMALL) // 2], "is corrupt: the end of the archive is missing"),
    Unloaded("Ran out of input", b"", "it is empty (0 bytes)", unpickled),
]


@pytest.mark.parametrize("case", UNLOADED, ids=lambda case: case.heading)
def test_the_error_is_real_and_the_file_is_explained(case: Unloaded, tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(case.content)
    with pytest.raises(Exception) as raised:
        case.read(path)
    assert says(raised.value, case.heading)
    with pytest.raises(nanscan.CheckpointError, match=re.escape(case.says)):
        nanscan.load(path)


IMPORTED = {
    "Can't get attribute '…' on <module '__main__'…>": "__main__",
    "No module named '…'": "models_of_last_year",
}


@pytest.mark.parametrize("heading, module", IMPORTED.items())
def test_what_a_pickle_imports_is_told_without_loading_it(
    heading: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    path = tmp_path / "last.pkl"
    path.write_bytes(f"c{module}\nNet\n.".encode())
    with pytest.raises((AttributeError, ModuleNotFoundError)) as raised:
        unpickled(path)
    assert says(raised.value, heading)
    (use,) = inspect_pickle(path).globals
    assert use.path == f"{module}.Net" and not use.allowed


PREFIXED = {
    f'Missing key(s) in state_dict: … Unexpected key(s) in state_dict: "{prefix}…"': prefix
    for prefix in ("_orig_mod.", "module.")
}


@pytest.mark.parametrize("heading, prefix", PREFIXED.items())
@pytest.mark.filterwarnings("ignore::nanscan.CheckpointWarning")
def test_prefixes_of_wrappers_are_matched_by_restore(heading: str, prefix: str, tmp_path: Path) -> None:
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    state = {prefix + key: value for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError) as raised:
        fresh.load_state_dict(state)
    assert says(raised.value, heading)
    torch.save({"model": state}, tmp_path / "last.pt")
    with nanscan.CheckpointManager(tmp_path) as manager:
        manager.restore(model=fresh, path=tmp_path / "last.pt")
    assert torch.equal(fresh.weight, model.weight)


def test_every_message_on_the_page_is_tested() -> None:
    tested = [case.heading for case in [*UNSAVED, *UNLOADED]]
    assert sorted(HEADINGS) == sorted([*tested, *IMPORTED, *PREFIXED, *NEWER.values()])
