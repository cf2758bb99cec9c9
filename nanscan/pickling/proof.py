"""Proof that a pickle loads elsewhere: a real process without this one's state unpickles it and says what failed."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import numpy as np
import torch

from nanscan import paddle_objects
from nanscan.pickling.light import PROTOCOL, dispatch_table, spawning
from nanscan.pickling.problem import PickleProblem
from nanscan.pickling.processes import TRIAL, ForkedProcess, FreshProcess, Process
from nanscan.pickling.verdict import MAINS, judge

__all__ = ["loads_elsewhere"]

_SMALL = 4096  # bytes up to which an array is sent as it is


def loads_elsewhere(
    places: Mapping[str, Any], *, for_process: bool = False, time_limit: float = 60.0
) -> list[PickleProblem]:
    """Unpickle each value in another process, and say what fails there.

    The process has this one's interpreter, `sys.path` and working folder, and nothing else of it: no `__main__`, no
    module that was made or changed at run time. The data of tensors and arrays is never sent; the process makes
    zeros of the same size. What the user's code prints there is dropped; a value that hangs is given up after the
    time limit, and one that crashes the process (a segmentation fault, `os._exit`) is a finding like the others.

    A class of the running script (`__main__`) is another matter: another *script* can't load it, the same script
    can, and resuming with the same script is what most checkpoints are for. So it is no finding by itself, except

    - `for_process=True`: a started worker imports the script anew, and finds what stands at its top level, outside of
      `if __name__ == "__main__"`; anything else, and any class of a notebook or of `python -c`, is an `"error"`;
    - a class of a notebook is a `"loss"` otherwise: it loads once the cell that defines it has run again.

    Whether such classes load at all is tried in a forked copy of this process (on Linux), which knows them.

    Args:
        places: path -> the value there, or its pickle as `pickle.PickleBuffer`.
        for_process: judge by what a started process gets, with multiprocessing's reducers.
        time_limit: seconds for one value, the start of the process and its imports included.

    Returns:
        The problems, in the order of the places; [] = each of them loads.

    >>> loads_elsewhere({"state": {"lr": 0.1}})
    []
    """
    if TRIAL in sys.modules:  # a module that is imported there asks the same again, and so on without end
        return []
    problems: dict[str, list[PickleProblem]] = {path: [] for path in places}
    pickles: dict[str, bytes] = {}
    for path, value in places.items():
        try:
            pickles[path] = _pickled(value, for_process)
        except Exception as error:
            reason = f"it can't be pickled: {type(error).__name__}: {error}"
            problems[path].append(PickleProblem(path, _name(value), reason, "leave it out, or drop it in __getstate__"))
    of_main = {path: data for path, data in pickles.items() if any(name.encode() in data for name in MAINS)}
    anew = pickles if for_process or not _main_file() else {key: pickles[key] for key in pickles if key not in of_main}
    forked = of_main if sys.platform == "linux" else {}
    results = [(False, *one) for one in _tried(FreshProcess, anew, time_limit)]
    results += [(True, *one) for one in _tried(ForkedProcess, forked, time_limit)]
    for in_copy, path, result in results:
        found = judge(result, for_process, _main_file(), time_limit, forked=in_copy)
        problems[path] += [PickleProblem(path, _name(places[path]), *verdict) for verdict in found]
    return [problem for listed in problems.values() for problem in listed]


class _StandInPickler(pickle.Pickler):
    """Pickles all but the data of tensors and arrays."""

    def __init__(self, file: IO[bytes], for_process: bool) -> None:
        super().__init__(file, PROTOCOL)
        self.dispatch_table = dispatch_table(for_process)
        self._for_process = for_process

    def persistent_id(self, value: Any) -> Any:
        if type(value) is np.ndarray and value.nbytes > _SMALL and not value.dtype.hasobject:
            return "array", value.dtype, value.shape
        if self._for_process and isinstance(value, torch.Tensor):  # its reducer would move it to shared memory
            return "tensor", value.dtype, tuple(value.shape), value.requires_grad, isinstance(value, torch.nn.Parameter)
        if paddle_objects.is_tensor(value):
            return "paddle", paddle_objects.dtype_name(value), paddle_objects.shape_of(value), value.stop_gradient
        if isinstance(value, torch.storage.TypedStorage):
            return "storage", value._untyped_storage.nbytes(), value.dtype
        return ("storage", value.nbytes(), None) if isinstance(value, torch.UntypedStorage) else None


def _pickled(value: Any, for_process: bool) -> bytes:
    if isinstance(value, pickle.PickleBuffer):
        return bytes(value)
    buffer = io.BytesIO()
    with warnings.catch_warnings(), spawning(for_process):
        warnings.simplefilter("ignore")
        _StandInPickler(buffer, for_process).dump(value)
    return buffer.getvalue()


def _tried(
    start: Callable[[float], Process], pickles: Mapping[str, bytes], time_limit: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Send one after the other; a process that died or hung is replaced for what remains."""
    process: Process | None = None
    try:
        for path, data in pickles.items():
            process = process or start(time_limit)
            result = _asked(process, data, time_limit)
            if "died" in result:
                result["exit_code"] = process.end()
                process = None
            yield path, result
    finally:
        if process is not None:
            process.end()


def _asked(process: Process, data: bytes, time_limit: float) -> dict[str, Any]:
    late = threading.Event()

    def give_up() -> None:
        late.set()
        process.kill()

    watch = threading.Timer(time_limit, give_up)
    watch.daemon = True
    watch.start()
    try:
        process.requests.write(struct.pack("<Q", len(data)) + data)
        process.requests.flush()
        line = process.answers.readline()
    except (OSError, ValueError):
        line = b""
    finally:
        watch.cancel()
    if line.endswith(b"\n"):
        return dict(json.loads(line))
    return {"died": "late" if late.is_set() else "crashed"}


def _main_file() -> str | None:
    """The script that is running; None in a notebook, at a prompt and with `python -c`."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return file if isinstance(file, str) and os.path.exists(file) else None


def _name(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
