"""Unpickles what it is sent and tells what happened. Runs in the process that proves loading: standard library only."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
import struct
import sys
import types
from typing import Any

__all__ = ["attempt", "discard_streams", "serve", "silence"]

_FRAMES = 8  # of a traceback, from its innermost call outwards
_OUT_OF_MEMORY = ("can't allocate memory", "Unable to allocate")


class _Unpickler(pickle.Unpickler):
    """Loads as pickle does; notes the names that are missing, and goes on with stand-ins to see what else fails."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.missing: list[dict[str, str]] = []

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError) as error:
            self.missing.append(
                {"module": module, "name": name, "error": type(error).__name__, "message": _text(error)}
            )
            return _stand_in(name)

    def persistent_load(self, key: Any) -> Any:
        """Data that was not sent: zeros of the same size, which cost no memory until somebody reads them."""
        import numpy as np

        kind, *rest = key
        if kind == "array":
            return np.zeros(rest[1], rest[0])
        if kind == "paddle":
            import paddle

            return paddle.zeros(rest[1], rest[0]).detach() if rest[2] else paddle.zeros(rest[1], rest[0])
        import torch

        if kind == "tensor":
            dtype, shape, requires_grad, parameter = rest
            tensor = torch.zeros(1, dtype=dtype, device="cpu").expand(shape).detach().requires_grad_(requires_grad)
            return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor
        storage = torch.from_numpy(np.zeros(rest[0], np.uint8)).untyped_storage()
        if rest[1] is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=rest[1], _internal=True)  # type: ignore[no-untyped-call]


def attempt(data: bytes) -> dict[str, Any]:
    """Unpickle; what went wrong, as plain data: the `missing` names, what was `raised`, the parameters that are `new`.

    >>> attempt(pickle.dumps(1.5)), attempt(b"c__main__\\nNot.There\\n.")["missing"][0]["name"]
    ({}, 'Not.There')
    """
    unpickler = _Unpickler(data)
    result: dict[str, Any] = {}
    try:
        loaded = unpickler.load()
    except BaseException as error:  # noqa: B036  sys.exit() in a __setstate__ is a finding like any other
        if not isinstance(error, MemoryError) and not any(words in _text(error) for words in _OUT_OF_MEMORY):
            result["raised"] = _described(error)
    else:
        with contextlib.suppress(Exception):  # parameters that can't be compared (lazy, sparse) are no fault
            new, of = _new_parameters(loaded, data)
            result = {"new": {"names": new, "of": of}} if new else {}
    if unpickler.missing:
        result = {"missing": unpickler.missing}  # what fails after a stand-in came in proves nothing
    return result


def _new_parameters(loaded: Any, data: bytes) -> tuple[list[str], int]:
    """Names of a module's parameters that did not come out of the pickle, and how many it has.

    The tensors that come out of it are zeros, so a number in a parameter was made while loading: anew if it is another
    one when it is loaded again, else out of bytes that were saved. The module may be an attribute of what was loaded.
    """
    named = _parameters_of(loaded)
    numbers = {name: p for name, p in named.items() if p.device.type == "cpu" and bool((p != 0).any())}
    again = _parameters_of(_Unpickler(data).load()) if numbers else {}
    return [name for name, p in numbers.items() if name in again and _differ(p, again[name])], len(named)


def _differ(a: Any, b: Any) -> bool:
    return a.shape != b.shape or not bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is like NaN


def _parameters_of(loaded: Any) -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    held = {"": loaded} if isinstance(loaded, torch.nn.Module) else dict(getattr(loaded, "__dict__", {}))
    modules = [(path, module) for path, module in held.items() if isinstance(module, torch.nn.Module)]
    return {f"{path}.{name}".lstrip("."): p for path, module in modules for name, p in module.named_parameters()}


def _stand_in(name: str) -> type:
    def accept(self: Any, *arguments: Any, **keywords: Any) -> None:
        return None

    methods: dict[str, Any] = dict.fromkeys(("__init__", "__setstate__", "append", "extend", "__setitem__"), accept)
    methods["__new__"] = lambda cls, *arguments, **keywords: object.__new__(cls)
    methods["__call__"] = lambda self, *arguments, **keywords: self
    return type(name.rpartition(".")[2], (), methods)


def _described(error: BaseException) -> dict[str, Any]:
    calls = []
    trace: types.TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename != attempt.__code__.co_filename:
            owner = trace.tb_frame.f_locals.get("self")
            named = type(owner).__qualname__ if "self" in trace.tb_frame.f_locals else ""
            calls.append({"function": code.co_name, "owner": named, "file": code.co_filename, "line": trace.tb_lineno})
        trace = trace.tb_next
    return {"error": type(error).__name__, "message": _text(error), "calls": calls[-_FRAMES:]}


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())[:500]
    except Exception:
        return "(its message can't be shown)"


def serve(source: int, target: int, time_limit: float) -> None:
    """Answer every pickle that comes in (8 bytes of length, then the bytes) with one line of JSON; end at the end.

    Args:
        source, target: file descriptors of our own, which no `print` and no `input` of the user's code reaches.
        time_limit: seconds for one; the asking process gives up by itself, unless it was killed meanwhile.
    """
    with os.fdopen(source, "rb") as requests, os.fdopen(target, "wb", buffering=0) as answers:
        while len(header := requests.read(8)) == 8:
            data = requests.read(struct.unpack("<Q", header)[0])
            _end_after(int(time_limit) + 10)
            answers.write(json.dumps(attempt(data)).encode() + b"\n")
            _end_after(0)
            _flush()


def _end_after(seconds: int) -> None:
    """Let the system end this process then, whatever it is doing; 0: not any more."""
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            continue


def silence() -> tuple[int, int]:
    """Take the standard streams away from the user's code; our own copies of stdin and stdout."""
    kept = os.dup(0), os.dup(1)
    discard_streams()
    return kept


def discard_streams() -> None:
    """From here on nothing is read from stdin, and what is printed is dropped."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if nothing > 2:
        os.close(nothing)
