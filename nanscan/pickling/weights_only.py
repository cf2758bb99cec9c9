"""What `torch.load(weights_only=True)` of the installed torch will refuse, told before anything is written."""

from __future__ import annotations

import contextlib
import copyreg
import io
import pathlib
import pickle
import pickletools
import re
import sys
import types
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nanscan.pickling.plain_forms import plain_form, plain_form_of_global
from nanscan.pickling.safe_globals import allowed, allowed_objects, never_allowed, python3_name, resolve

__all__ = ["expression", "refused", "surely_plain", "unknown_opcodes"]

_torch: Any = torch  # its storages and its loader are not typed
_code2op: dict[str, pickletools.OpcodeInfo] = {opcode.code: opcode for opcode in pickletools.opcodes}
_PLAIN = (type(None), bool, float, str, complex)
_PROTOCOL = 2  # torch.save's; the loader knows no other
_COPIED_BYTES = 1 << 20  # storages up to this size in all are tried with their data, larger ones without
_OF_AN_OS = ("PosixPath", "WindowsPath")
_LISTED = 12  # more names than this are no allowlist that anybody would write


def refused(value: object) -> tuple[str, str] | None:
    """Whether `torch.load(weights_only=True)` of the installed torch refuses this value, why, and what to do.

    The value is pickled as `torch.save` would do it, in memory and without the data of its tensors, and handed to
    torch's own restricted loader: the answer is the real one, and what the program added by
    `torch.serialization.add_safe_globals` counts.

    Args:
        value: anything; containers are judged with what they hold.

    Returns:
        None if it loads; else the reason and the fix: how to convert it and, where that can work, how to allow it.

    >>> import pathlib
    >>> refused(0.5) is None, refused(torch.ones(2)) is None
    (True, True)
    >>> reason, fix = refused(pathlib.PurePosixPath("runs/7"))
    >>> reason
    'torch.load(weights_only=True) refuses pathlib.PurePosixPath: it allows no global pathlib.PurePosixPath'
    >>> print(fix.replace(", call ", ",\\ncall "))
    store str(x); or, if only trusted files are loaded,
    call torch.serialization.add_safe_globals([pathlib.PurePosixPath]) before loading
    """
    if surely_plain(value):
        return None
    try:
        data, storages = _pickled(value)
    except Exception as failure:  # whatever the value's own __reduce__ and __getstate__ raise
        return _unpicklable(value, failure)
    error = _try(data, storages)
    return None if error is None else _explain(value, data, error)


def surely_plain(value: Any) -> bool:
    """Whether it loads, told by its type alone; False: it has to be tried."""
    kind = type(value)
    if kind in _PLAIN or kind is bytearray:
        return True
    if kind is bytes:
        return len(value) > 0
    if kind is int:
        return bool(value.bit_length() < 2000)  # beyond 255 bytes it needs another opcode
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return not value.__dict__ and bool(value.layout is torch.strided)
    return False


class _LightPickler(pickle.Pickler):
    """Pickles as torch.save does, keeping the tensors' storages aside instead of writing them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.storages: list[torch.storage.TypedStorage] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            storage = obj
        elif torch.is_storage(obj):
            storage = _torch.storage.TypedStorage(wrap_storage=obj, dtype=torch.uint8, _internal=True)
        else:
            return None
        self.storages.append(storage)
        return "storage", len(self.storages) - 1

    def reducer_override(self, obj: Any) -> Any:
        """A large array goes as one element of its dtype: only what it is counts here."""
        if type(obj) is np.ndarray and obj.nbytes > 4096 and not obj.dtype.hasobject:
            return np.zeros(1, obj.dtype).__reduce_ex__(_PROTOCOL)
        return NotImplemented


def _pickled(value: object) -> tuple[bytes, list[torch.storage.TypedStorage]]:
    buffer = io.BytesIO()
    pickler = _LightPickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), pickler.storages


def _try(data: bytes, storages: list[torch.storage.TypedStorage]) -> Exception | None:
    """Let torch's restricted loader read it; the error, if it refuses.

    It gets storages of its own, so that a `__setstate__` that the user allowed can't write into the caller's weights.
    """
    light = sum(storage._untyped_storage.nbytes() for storage in storages) > _COPIED_BYTES
    unpickler = _torch._weights_only_unpickler.Unpickler(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = lambda key: _stand_in(storages[key[1]], light)
    checks = torch._utils._sparse_tensors_to_validate
    before = len(checks)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            unpickler.load()
    except pickle.UnpicklingError as error:
        return error
    except Exception as error:
        return None if light else error  # it passed the allowlist; without data an allowed class may well stumble
    finally:
        del checks[before:]
    return None


def _stand_in(storage: torch.storage.TypedStorage, light: bool) -> torch.storage.TypedStorage:
    data: Any = storage._untyped_storage
    own = _torch.UntypedStorage(data.nbytes(), device="meta") if light else data.clone()
    stand_in: torch.storage.TypedStorage = _torch.storage.TypedStorage(
        wrap_storage=own, dtype=storage.dtype, _internal=True
    )
    return stand_in


@dataclass
class _Needs:
    """What the loader would have to allow for a stream to load."""

    globals: list[str] = field(default_factory=list)  # dotted paths, in the order of the stream
    impossible: list[str] = field(default_factory=list)  # why no allowlist helps
    culprit: object = None  # the first object that needs any of it
    found: bool = False

    def add(self, path: str) -> None:
        if path not in self.globals:
            self.globals.append(path)
        if never_allowed(path):
            self.impossible.append(f"{path} must not be allowed")


class _AskingPickler(_LightPickler):
    """Notes, object by object, what its reduction would need on the other side."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.needs = _Needs()
        self.allowed = allowed_objects()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if _is_global(obj):
            self._note(obj, obj if not allowed(_path(obj)) else None)
            return NotImplemented
        reduce = copyreg.dispatch_table.get(kind)
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented:
            reduced = reduce(obj) if reduce is not None else obj.__reduce_ex__(_PROTOCOL)
        if isinstance(reduced, tuple):
            self._note_reduction(obj, kind, reduced)
        return reduced

    def _note_reduction(self, obj: object, kind: type, reduced: tuple[Any, ...]) -> None:
        function, arguments, state, listed, keyed = (*reduced, None, None, None)[:5]
        made = arguments[0] if getattr(function, "__name__", "") == "__newobj__" else function
        self._note(obj, None if made in self.allowed else made)
        for kind_in_it in filter(_is_global, arguments or ()):  # the class that a tensor subclass is rebuilt as
            self._note(obj, None if allowed(_path(kind_in_it)) else kind_in_it)
        if state is not None and kind not in (torch.Tensor, torch.nn.Parameter, OrderedDict):
            self._note(obj, None if kind in self.allowed else kind, state_of=True)
        if (listed is not None and kind is not list) or (
            keyed is not None and kind not in (dict, OrderedDict, Counter)
        ):
            self.needs.impossible.append(f"items are restored into plain containers only, not into {_shown(kind)}")
            self._blame(obj)

    def _note(self, obj: object, needed: Any, state_of: bool = False) -> None:
        if needed is None:
            return
        self._blame(obj)
        if state_of:  # the type never shows in the stream: a function made the object
            self.needs.add(_path(needed))

    def _blame(self, obj: object) -> None:
        if not self.needs.found:
            self.needs.culprit, self.needs.found = obj, True


def _explain(value: object, data: bytes, error: Exception) -> tuple[str, str]:
    asking = _AskingPickler(io.BytesIO())
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")  # said once already, by the first pickling, which went through
        asking.dump(value)
    needs = _with_stream(asking.needs, data)
    culprit = needs.culprit if needs.found else value
    missing = [path for path in needs.globals if not allowed(path)]
    what = f"it allows no global {', '.join(missing[:4])}{' …' if missing[4:] else ''}" if missing else _said(error)
    unasked = plain_form_of_global(_path(culprit)) if isinstance(culprit, type) else None
    kind = culprit if isinstance(culprit, type) and unasked else type(culprit)
    reason = f"torch.load(weights_only=True) refuses {_shown(kind)}: {what}"
    return reason, _fix(unasked or plain_form(culprit), missing, needs.impossible)


def _with_stream(needs: _Needs, data: bytes) -> _Needs:
    """Add what the stream itself shows: every global by its name there, and opcodes that the loader lacks."""
    ordered = _Needs(culprit=needs.culprit, found=needs.found, impossible=needs.impossible)
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "GLOBAL":
            path = ".".join(python3_name(*str(argument).split(" ", 1)))
            if not allowed(path):
                ordered.add(path)
        elif unknown_opcodes([opcode.name]):
            ordered.impossible.append(f"it does not know the opcode {opcode.name}")
    for path in needs.globals:
        ordered.add(path)
    return ordered


def unknown_opcodes(names: Iterable[str]) -> list[str]:
    """Those of pickle's opcodes that torch's restricted loader does not know.

    >>> unknown_opcodes(["GLOBAL", "STACK_GLOBAL"])
    ['STACK_GLOBAL']
    """
    return [name for name in names if not hasattr(_torch._weights_only_unpickler, name)]


def _fix(convert: str, missing: list[str], impossible: Iterable[str]) -> str:
    if list(impossible) or not missing or len(missing) > _LISTED:
        return convert
    objects = ", ".join(expression(path) for path in missing)
    return (
        f"{convert}; or, if only trusted files are loaded, call "
        f"torch.serialization.add_safe_globals([{objects}]) before loading"
    )


def expression(path: str) -> str:
    """How a person writes the object; with the name in the file, where the object goes by another one.

    >>> expression("builtins.range"), expression("torch.optim.sgd.SGD")
    ('range', 'torch.optim.SGD')
    """
    module, _, name = path.rpartition(".")
    if module in ("pathlib", "pathlib._local") and name in _OF_AN_OS:  # Python 3.13 wrote the second
        name = name if name == type(pathlib.Path()).__name__ else f"Pure{name}"  # the other system's has no files here
        return f"pathlib.{name}" if path == f"pathlib.{name}" else f'(pathlib.{name}, "{path}")'
    known = resolve(path)
    if known is not None and not _is_global(known):  # a constant, which does not know where it belongs
        return f'({path.removeprefix("builtins.")}, "{path}")'
    own = path if known is None else _path(known)
    written = re.sub(r"^(builtins|__main__)\.", "", own if known is None else _reachable(own, known))
    return written if own == path else f'({written}, "{path}")'


def _reachable(path: str, known: Any) -> str:
    """The path, or a shorter one of the same object where a package does not show the module that it is in."""
    module, _, name = path.rpartition(".")
    while module and _attribute(module, name) is not known:
        module = module.rpartition(".")[0]
    return f"{module}.{name}" if module else path


def _attribute(module: str, name: str) -> Any:
    top, *rest = [*module.split("."), name]
    found: Any = sys.modules.get(top)
    for part in rest:
        found = getattr(found, part, None)
    return found


def _said(error: Exception) -> str:
    """The loader's own words, with the opcode's name in place of its number."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    operand = re.search(r"Unsupported operand (\d+)", text)
    if operand:
        return f"it does not know the opcode {_code2op[chr(int(operand[1]))].name}"
    return text[:200]


def _unpicklable(value: object, error: Exception) -> tuple[str, str]:
    reason = f"{_shown(type(value))} can't be pickled at all: {type(error).__name__}: {error}"
    return reason, "leave it out, or see nanscan.find_unpicklable for what inside it is at fault"


def _is_global(obj: object) -> bool:
    return isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType))


def _path(known: Any) -> str:
    """Module and qualified name, as pickle writes a class or function."""
    module = getattr(known, "__module__", None) or "builtins"
    return f"{module}.{getattr(known, '__qualname__', None) or getattr(known, '__name__', known)}"


def _shown(kind: type) -> str:
    return _path(kind).removeprefix("builtins.")
