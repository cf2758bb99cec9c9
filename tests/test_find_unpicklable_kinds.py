"""Each kind of thing that can't be pickled: found where it is, by type, with a reason and a fix of its own."""

from __future__ import annotations

import _thread
import asyncio
import collections
import concurrent.futures
import contextvars
import ctypes
import functools
import io
import itertools
import logging
import mmap
import multiprocessing
import pickle
import queue
import re
import socket
import sqlite3
import ssl
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from nanscan import find_unpicklable
from tests.unpicklable import Box, Methods, SavingExits, SavingRaises, Shade, Wrong, replaced


async def _coroutine() -> None:
    pass


async def _async_generator() -> Any:
    yield 1


def _closed(coroutine: Any) -> Any:
    coroutine.close()
    return coroutine


def _closure() -> Any:
    bound = 3

    def inner() -> int:
        return bound

    return inner


def _local_class() -> Any:
    class Local:
        pass

    return Local()


def _shared_reference() -> Any:
    return weakref.ref(Methods)


_KINDS: dict[str, tuple[Any, str, str, str]] = {
    # name: (how it is made, its type, words of the reason, words of the fix)
    "lock": (threading.Lock, "_thread.lock", "lock", "__getstate__"),
    "rlock": (threading.RLock, "_thread.RLock", "lock", "nanscan.TransientState"),
    "condition": (threading.Condition, "threading.Condition", "lock", "__getstate__"),
    "event": (threading.Event, "threading.Event", "lock", "__getstate__"),
    "semaphore": (threading.Semaphore, "threading.Semaphore", "lock", "__getstate__"),
    "barrier": (lambda: threading.Barrier(2), "threading.Barrier", "lock", "__getstate__"),
    "thread": (threading.Thread, "threading.Thread", "thread", "start it again"),
    "thread-local": (threading.local, "_thread._local", "thread", "__getstate__"),
    "queue": (queue.Queue, "queue.Queue", "queue", "multiprocessing.Queue"),
    "simple queue": (queue.SimpleQueue, "_queue.SimpleQueue", "queue", "multiprocessing.Queue"),
    "shared queue": (multiprocessing.Queue, "multiprocessing.queues.Queue", "inheritance", "argument of Process"),
    "shared lock": (multiprocessing.Lock, "multiprocessing.synchronize.Lock", "inheritance", "argument of Process"),
    "executor": (
        concurrent.futures.ThreadPoolExecutor,
        "concurrent.futures.thread.ThreadPoolExecutor",
        "pool",
        "make it where it is used",
    ),
    "future": (concurrent.futures.Future, "concurrent.futures._base.Future", "workers", "result()"),
    "asyncio loop": (asyncio.new_event_loop, None, "event loop", "__getstate__"),
    "coroutine": (lambda: _closed(_coroutine()), "coroutine", "running code", "__iter__"),
    "async generator": (_async_generator, "async_generator", "running code", "__iter__"),
    "lambda": (lambda: lambda x: x, "function", "lambda defined in", "named function"),
    "closure": (_closure, "function", "closure defined in _closure()", "named function"),
    "local class": (
        _local_class,
        "tests.test_find_unpicklable_kinds._local_class.<locals>.Local",
        "local class",
        "top",
    ),
    "replaced function": (lambda: replaced, "function", "not the same object", "functools.wraps"),
    "namedtuple under another name": (lambda: Wrong(1, 2), "tests.unpicklable.Right", "not found", "bind it"),
    "generator": (lambda: (i for i in range(3)), "generator", "running code", "list"),
    "open file": (lambda: open(__file__), "_io.TextIOWrapper", "open file", "keep the path"),  # noqa: SIM115
    "binary file": (lambda: open(__file__, "rb"), "_io.BufferedReader", "open file", "keep the path"),  # noqa: SIM115
    "stdout": (lambda: sys.__stdout__, "_io.TextIOWrapper", "open file", "keep the path"),
    "memory map": (lambda: mmap.mmap(-1, 10), "mmap.mmap", "open file", "keep the path"),
    "temporary file": (tempfile.NamedTemporaryFile, "tempfile._TemporaryFileWrapper", "temporary", "path"),
    "socket": (socket.socket, "socket.socket", "connection", "connect lazily"),
    "ssl context": (ssl.create_default_context, "ssl.SSLContext", "connection", "connect lazily"),
    "sqlite": (lambda: sqlite3.connect(":memory:"), "sqlite3.Connection", "database", "connect lazily"),
    "child process": (lambda: subprocess.Popen(["true"]), "subprocess.Popen", "running process", "command line"),
    "module": (lambda: np, "module", "module", "import it where it is used"),
    "weakref": (_shared_reference, "weakref.ReferenceType", "weak reference", "strong reference"),
    "weak dict": (weakref.WeakKeyDictionary, "weakref.WeakKeyDictionary", "weak reference", "strong reference"),
    "weak set": (weakref.WeakSet, "_weakrefset.WeakSet", "weak reference", "strong reference"),
    "mappingproxy": (lambda: types.MappingProxyType({}), "mappingproxy", "view", "dict("),
    "dict view": (lambda: {}.keys(), "dict_keys", "view", "list("),
    "memoryview": (lambda: memoryview(b"x"), "memoryview", "view", "bytes("),
    "code": (lambda: compile("1", "f", "eval"), "code", "Python code", "function's name"),
    "frame": (sys._getframe, "frame", "Python code", "source text"),
    "cell": (lambda: _closure().__closure__[0], "cell", "Python code", "source text"),
    "property": (lambda: property(len), "property", "descriptor", "keep the value"),
    "context variable": (lambda: contextvars.ContextVar("x"), "_contextvars.ContextVar", "context", "__getstate__"),
    "match": (lambda: re.match("a", "a"), "re.Match", "match", "groups()"),
    "pointer": (lambda: ctypes.pointer(ctypes.c_int(1)), None, "memory", "keep the data"),
    "logging handler": (logging.StreamHandler, "logging.StreamHandler", "lock", "logging.getLogger"),
    "tensorboard writer": (
        lambda: SummaryWriter(tempfile.mkdtemp()),
        "torch.utils.tensorboard.writer.SummaryWriter",
        "writer",
        "log_dir",
    ),
    "torch stream": (lambda: torch.Stream(device="cpu"), "torch.Stream", "device", "lazily"),
    "store": (torch.distributed.HashStore, "torch._C._distributed_c10d.HashStore", "process group", "default group"),
    "script": (
        lambda: torch.jit.script(nn.ReLU()),
        "torch.jit._script.RecursiveScriptModule",
        "TorchScript",
        "torch.jit.save",
    ),
    "graph": (torch._C.Graph, "torch.Graph", "TorchScript", "torch.jit.save"),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        "torch.nn.utils.parametrize.ParametrizedLinear",
        "state_dict",
        "state_dict()",
    ),
    "raising __getstate__": (SavingRaises, "tests.unpicklable.SavingRaises", "ValueError: not while", "mend its"),
    "exiting __reduce__": (SavingExits, "tests.unpicklable.SavingExits", "SystemExit: 3", "mend its"),
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.filterwarnings("ignore")
def test_each_kind_is_named_at_its_place_with_reason_and_fix(kind: str) -> None:
    make, type_name, reason, fix = _KINDS[kind]
    value = make()
    with pytest.raises(BaseException):  # noqa: B017  pickle agrees
        pickle.loads(pickle.dumps({"x": value}))
    (problem,) = find_unpicklable({"epoch": 3, "x": value, "y": [1]}, name="state")
    assert problem.path == 'state["x"]'
    assert type_name is None or problem.type == type_name
    assert reason in problem.reason and fix in problem.fix, problem
    assert problem.severity == "error"


_FINE: dict[str, Any] = {
    "logger": lambda: logging.getLogger("tests.fine"),
    "torch function": lambda: torch.abs,
    "functional": lambda: nn.functional.relu,
    "bound method": lambda: Methods().method,
    "classmethod": lambda: Methods.made,
    "staticmethod": lambda: Methods.static,
    "nested class": lambda: Methods.Inner(),
    "builtin method": lambda: [].append,
    "partial": lambda: functools.partial(print, 1, end=""),
    "defaultdict": lambda: collections.defaultdict(list, a=[1]),
    "deque": lambda: collections.deque([1], maxlen=3),
    "counter": lambda: collections.Counter("ab"),
    "chain map": lambda: collections.ChainMap({"a": 1}, {}),
    "count": itertools.count,
    "bytes io": lambda: io.BytesIO(b"x"),
    "torch generator": torch.Generator,
    "numpy generator": lambda: np.random.default_rng(0),
    "numpy scalar": lambda: np.float64(1),
    "structured array": lambda: np.zeros(2, [("a", "i4")]),
    "device": lambda: torch.device("cpu"),
    "size": lambda: torch.Size([1]),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta tensor": lambda: torch.empty(2, device="meta"),
    "path": lambda: Path("x"),
    "generic alias": lambda: list[int],
    "pattern": lambda: re.compile("a"),
    "range": lambda: range(3),
    "exception": lambda: ValueError("x", 3),
    "traceback in an exception": lambda: _caught(),
    "not implemented": lambda: (NotImplemented, ...),
    "averaged model": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "compiled": lambda: torch.compile(nn.Linear(2, 2)),
    "data parallel": lambda: nn.DataParallel(nn.Linear(2, 2)),
    "grad scaler": lambda: torch.amp.GradScaler("cpu"),
}


def _caught() -> ValueError:
    try:
        raise ValueError("x")
    except ValueError as error:
        return error


@pytest.mark.parametrize("kind", _FINE)
@pytest.mark.filterwarnings("ignore")
def test_what_pickles_and_loads_gives_an_empty_list(kind: str) -> None:
    value = _FINE[kind]()
    pickle.loads(pickle.dumps(value))
    assert find_unpicklable({"x": value}, check_loading=False) == []


def test_a_lambda_is_told_with_its_function_file_and_line() -> None:
    state = {"fn": lambda x: x}
    line = sys._getframe().f_lineno - 1
    (problem,) = find_unpicklable(state)
    assert f"{__file__}:{line}" in problem.reason
    assert "in test_a_lambda_is_told_with_its_function_file_and_line()" in problem.reason


def test_several_faults_in_one_object_are_all_listed() -> None:
    dataset = Box(file=open(__file__), rows=(i for i in range(3)), np=np, owner=_shared_reference(), lr=0.1)  # noqa: SIM115
    paths = {problem.path for problem in find_unpicklable(dataset)}
    assert paths == {"dataset.file", "dataset.rows", "dataset.np", "dataset.owner"}


def test_an_enum_member_with_a_bad_value_is_found() -> None:
    (problem,) = find_unpicklable(Shade.BAD, name="shade")
    assert problem.path == "shade.value[0]"


def test_a_mapped_array_is_a_loss_not_an_error(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", dtype="f4", mode="w+", shape=(3,))
    (problem,) = find_unpicklable({"x": mapped})
    assert problem.severity == "loss" and "12 bytes" in problem.reason and "without the file" in problem.fix


def test_a_lock_of_the_interpreter_is_named_as_such() -> None:
    assert find_unpicklable([_thread.allocate_lock()], name="held")[0].describe().startswith("held[0] (_thread.lock): ")
