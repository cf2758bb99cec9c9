"""The pickle in a file of paddle.save: is it whole, and does it ask for anything but tensors and plain values?"""

from __future__ import annotations

import os
import pickle
from typing import Any

from nanscan.errors import CheckpointError, CorruptCheckpoint

__all__ = ["check_whole", "refuse_code"]

_PLAIN = frozenset(
    {"collections OrderedDict", "_codecs encode", "numpy ndarray", "numpy dtype"}
    | {
        f"{module} {name}"
        for module in ("builtins", "__builtin__")
        for name in ("tuple", "set", "complex", "bytearray")
    }
    | {f"numpy.{core}.multiarray {name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")}
    | {f"numpy.{core}.numeric _frombuffer" for core in ("core", "_core")}
)
_ADVICE = "Use an older checkpoint or another copy of this one"


class _Refused(Exception):
    """A name that is not among the plain ones."""


class _PlainUnpickler(pickle.Unpickler):
    """Makes arrays, numbers, text and containers, and refuses all else before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module} {name}" not in _PLAIN:
            raise _Refused(f"{module}.{name}")
        return super().find_class(module, name)


def refuse_code(fd: int, path: str) -> None:
    """Raise `CheckpointError` if the file asks for anything that may run code."""
    try:
        _unpickled(fd)
    except _Refused as error:
        raise CheckpointError(
            f"{path!r} holds {error}, which weights_only=True refuses because unpickling it may run code. Convert it "
            "where the file is made (to numbers, text, lists, tensors); or, if you trust the file, load with "
            "weights_only=False"
        ) from None
    except Exception as error:
        raise _unreadable(fd, path, error) from error


def check_whole(fd: int, path: str) -> None:
    """Raise `CorruptCheckpoint` if a file without digests can't be read to the end of its pickle."""
    try:
        _unpickled(fd)
    except _Refused:
        return  # up to there it is; whether it may be loaded is another question
    except Exception as error:
        raise _unreadable(fd, path, error) from error


def _unpickled(fd: int) -> Any:
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return _PlainUnpickler(file, encoding="latin1").load()


def _unreadable(fd: int, path: str, error: Exception) -> CorruptCheckpoint:
    head = os.pread(fd, 4, 0)
    if not head:
        what = "it is empty (0 bytes)"
    elif head[:1] != b"\x80":
        what = f"it does not begin as a pickle does (first bytes {head.hex(' ')})"
    else:
        what = f"its pickle is cut off or damaged ({error})"
    return CorruptCheckpoint(f"{path!r} is no file of paddle.save that can be read: {what}. {_ADVICE}.")
