"""A trial of pickling that touches no tensor's data and writes nothing; for another process, without starting one."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import warnings
from collections.abc import Iterator
from multiprocessing import context as process_context
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import SemLock
from typing import Any

import numpy as np
import torch

from nanscan import paddle_objects
from nanscan.pickling.trust import own_hook

__all__ = ["PROTOCOL", "bulky", "dispatch_table", "failure", "failure_in_torch_save", "spawning"]

PROTOCOL = pickle.DEFAULT_PROTOCOL
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _LightPickler(pickle.Pickler):
    """Leaves out what is big and known to pickle."""

    def __init__(self, for_process: bool, skipped: frozenset[int]) -> None:
        super().__init__(_Nowhere(), PROTOCOL)
        self.dispatch_table = dispatch_table(for_process)
        self._for_process = for_process
        self._skipped = skipped

    def persistent_id(self, value: Any) -> str | None:
        if bulky(value) or id(value) in self._skipped:
            return "data"
        if self._for_process and _only_forks(value):
            raise RuntimeError("a semaphore made in a fork context has no name that a spawned process could open")
        return None


def _only_forks(value: Any) -> bool:
    """Whether `value` is a lock that crashes a spawned process, to which Python 3.10 sends it all the same."""
    return sys.platform != "win32" and issubclass(type(value), SemLock) and value._semlock.name is None


def bulky(value: Any) -> bool:
    """Whether `value` is a tensor, a storage or an array of numbers."""
    kind = type(value)
    if issubclass(kind, np.ndarray):
        return not value.dtype.hasobject and not own_hook(kind, "__reduce__", "__reduce_ex__")
    return issubclass(kind, (torch.Tensor, *_STORAGES)) or paddle_objects.is_tensor(value)


def dispatch_table(for_process: bool) -> Any:
    """Who reduces which type: what `copyreg` knows, and for another process what multiprocessing adds."""
    import copyreg

    return ForkingPickler(io.BytesIO()).dispatch_table if for_process else copyreg.dispatch_table


def failure(value: Any, for_process: bool = False, skipped: frozenset[int] = frozenset()) -> BaseException | None:
    """What pickling `value` raises, leaving out the data of tensors and the ids `skipped`; None if it passes."""
    try:
        with quiet():
            _LightPickler(for_process, skipped).dump(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: B036  a reducer that calls sys.exit() is a finding too
        return error
    return None


def failure_in_torch_save(value: Any) -> BaseException | None:
    """What an older protocol, torch.save's, raises for a value that is saved by a name; None if it passes."""
    try:
        pickle.dumps(value, torch.serialization.DEFAULT_PROTOCOL)
    except Exception as error:
        return error
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of reducers: what they warn about is listed as a loss."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _NotSpawning:
    """Stands in for a process that is being started: locks and sockets may then be reduced, and nothing happens."""

    def duplicate_for_child(self, handle: Any) -> Any:
        return handle

    DupFd = duplicate_for_child


@contextlib.contextmanager
def spawning(active: bool) -> Iterator[None]:
    """What may only pass while a process is started passes within, in this thread."""
    before = process_context.get_spawning_popen()
    if active:
        process_context.set_spawning_popen(_NotSpawning())  # type: ignore[arg-type]
    try:
        yield
    finally:
        process_context.set_spawning_popen(before)
