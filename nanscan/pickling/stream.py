"""What is in a pickle or torch file, told without running any of it: globals, tensors, and what loading would do."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from nanscan.pickling.containers import NotAPickle, Part, item_size, kind_of, parts_of
from nanscan.pickling.opcodes import COMPUTED, Global, Import, Trace, follow
from nanscan.pickling.safe_globals import allowed, pickle3_name, python3_name, runs_code
from nanscan.pickling.weights_only import unknown_opcodes

__all__ = ["GlobalUse", "NotAPickle", "PickleContents", "inspect_pickle"]

_NESTING = 4  # pickles in byte strings of pickles …
_LOADER = Global("torch.storage", "_load_from_bytes")
_REBUILDS = (
    "_rebuild_tensor",
    "_rebuild_sparse",
    "_rebuild_qtensor",
    "_rebuild_meta",
    "_rebuild_nested",
    "_rebuild_dev",
)


@dataclass
class GlobalUse:
    """A name that the file imports when it is loaded.

    Attributes:
        module, name: in the spelling of today.
        count: how often.
        place: the first: which pickle of the file, and the offset in bytes in it.
        allowed: torch.load(weights_only=True) allows it, as this process has it set up.
        danger: why it would run code when loaded, or None. None is no promise: any class's own code runs.
    """

    module: str
    name: str
    count: int
    place: str
    allowed: bool
    danger: str | None

    @property
    def path(self) -> str:
        """`module.name`."""
        return f"{self.module}.{self.name}"


@dataclass
class PickleContents:
    """What was found in a file.

    Attributes:
        kind: `pickle`, `torch legacy file`, `torch tar file` or `torch zip archive`.
        protocols: those that occur.
        pickles: their number, those in byte strings not counted.
        nested: pickles in byte strings.
        globals: every imported name, the dangerous first, then the refused.
        tensors, tensor_bytes: how many are rebuilt, and the size of their storages.
        persistent_ids: references to data outside of the pickle, and how many there are that are no storages of torch.
        foreign_ids: the second of these.
        opcodes: those that torch.load(weights_only=True) does not know; its allowlist apart, they are refused.
        notes: what else a reader should know.
        error: why the file could not be followed to its end; what comes before that is listed all the same.
    """

    kind: str
    protocols: list[int] = field(default_factory=list)
    pickles: int = 0
    nested: int = 0
    globals: list[GlobalUse] = field(default_factory=list)
    tensors: int = 0
    tensor_bytes: int = 0
    persistent_ids: int = 0
    foreign_ids: int = 0
    opcodes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def refused(self) -> list[GlobalUse]:
        """The names that torch.load(weights_only=True) does not allow."""
        return [use for use in self.globals if not use.allowed]

    @property
    def dangerous(self) -> list[GlobalUse]:
        """The names that would run code when loaded."""
        return [use for use in self.globals if use.danger]

    @property
    def clean(self) -> bool:
        """True if nothing in it would be refused by torch.load(weights_only=True), and nothing run by pickle."""
        odd = self.kind != "pickle" and (self.opcodes or self.foreign_ids or self.kind == "torch tar file")
        return not (self.refused or self.dangerous or self.error or odd)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "clean": self.clean}


def inspect_pickle(source: str | os.PathLike[str] | bytes | IO[bytes]) -> PickleContents:
    """List what a pickle, several in a row, or a torch file holds and imports. None of it is run, nothing is imported.

    Args:
        source: a path, the bytes, or a seekable binary file.

    Raises:
        NotAPickle: it is empty or something else.
        OSError: it can't be read.

    >>> import pickle
    >>> contents = inspect_pickle(b"cos\\nsystem\\n(S'true'\\ntR.")
    >>> contents.dangerous[0].path, contents.dangerous[0].danger, contents.clean
    ('os.system', 'os.system acts on the system', False)
    >>> inspect_pickle(pickle.dumps({"lr": 0.1})).globals
    []
    """
    if isinstance(source, bytes):
        return _inspect(io.BytesIO(source))
    if isinstance(source, (str, os.PathLike)):
        with Path(source).open("rb") as stream:
            return _inspect(stream)
    return _inspect(source)


def _inspect(stream: IO[bytes]) -> PickleContents:
    kind = kind_of(stream)
    collector = _Collector(PickleContents(kind))
    for place, trace in parts_of(stream, kind):
        if place == "magic number":
            collector.contents.kind = "torch legacy file"
        if kind == "pickle" and trace.error and not collector.contents.pickles and not trace.imports:
            _refuse_garbage(trace)
        collector.add(place, trace)
    return collector.finished()


def _refuse_garbage(trace: Trace) -> None:
    """A file that fails before it has done anything is no pickle; a truncated one has begun as one."""
    if "PROTO" not in trace.opcodes and trace.size < 64 or not trace.opcodes:
        raise NotAPickle(f"it is no pickle: {trace.error}")


def _loads_literal_bytes_only(trace: Trace) -> bool:
    """Whether torch's loader of nested files, which pickled tensors call, gets no bytes but those looked into here."""
    calls = [arguments for function, arguments in trace.rebuilt if function == _LOADER]
    literal = all(call is not None and len(call) == 1 and isinstance(call[0], bytes) for call in calls)
    return literal and bool(calls) and _LOADER not in trace.handed_on


def _storage_size(key: Any) -> int | None:
    """Bytes of the storage that a persistent id of torch names; None for any other id."""
    if not isinstance(key, tuple) or len(key) < 5 or key[0] != "storage":
        return None
    if not isinstance(key[2], (str, int)) or not isinstance(key[4], int):  # hashing a tuple of tuples may never end
        return None
    return key[4] * item_size(getattr(key[1], "name", ""))


class _Collector:
    """Sums up the traces of a file's pickles."""

    def __init__(self, contents: PickleContents) -> None:
        self.contents = contents
        self._uses: dict[tuple[str, str], GlobalUse] = {}
        self._storages: dict[Any, int] = {}

    def add(self, place: str, trace: Trace) -> None:
        """One pickle of the file."""
        contents = self.contents
        if trace.error:
            if contents.kind == "pickle" and contents.pickles and not trace.imports:
                contents.notes.append(f"what follows the first {contents.pickles} is no pickle, and no loader reads it")
                return
            said = f"{place}, offset {trace.size}: {trace.error} (truncated or damaged, or no pickle from there on)"
            contents.error = contents.error or said
        if trace.opcodes:
            contents.pickles += 1
            contents.protocols = sorted({*contents.protocols, trace.protocol})
        contents.opcodes = sorted({*contents.opcodes, *unknown_opcodes(trace.opcodes)})
        self._tensors(trace)
        for where, part in self._with_nested(place, trace, 0):
            looked_into = _loads_literal_bytes_only(part)
            for one in part.imports:
                self._use(one, where, harmless=looked_into and one.what == _LOADER)

    def _with_nested(self, place: str, trace: Trace, depth: int) -> Iterator[Part]:
        yield place, trace
        for data in trace.byte_strings if depth < _NESTING else ():
            stream = io.BytesIO(data)
            while stream.tell() < len(data):
                inner = follow(stream)
                if inner.error and ("PROTO" not in inner.opcodes or not inner.imports):
                    break
                if inner.imports or inner.byte_strings:
                    self.contents.nested += 1
                    yield from self._with_nested(f"a byte string in {place}", inner, depth + 1)
                if inner.error:
                    break

    def _use(self, one: Import, place: str, harmless: bool) -> None:
        module, name = pickle3_name(*one.what) if one.protocol <= 2 else one.what
        use = self._uses.get((module, name))
        if use is not None and (use.danger or harmless or one.what != _LOADER):
            use.count += 1
            return
        danger = None if harmless else runs_code(module, name) or runs_code(*pickle3_name(module, name))
        if COMPUTED in module + name:
            danger = "its name is computed while loading: nobody can tell what it is"
        passes = allowed(".".join(python3_name(*one.what)))
        self._uses[module, name] = GlobalUse(module, name, 1, f"{place}, offset {one.offset}", passes, danger)

    def _tensors(self, trace: Trace) -> None:
        for function, _ in trace.rebuilt:
            self.contents.tensors += function.module == "torch._utils" and function.name.startswith(_REBUILDS)
        for key in trace.persistent:
            self.contents.persistent_ids += 1
            size = _storage_size(key)
            if size is not None:
                self._storages[key[2]] = size
            else:
                self.contents.foreign_ids += 1

    def finished(self) -> PickleContents:
        """The sums, in the order in which they should be read."""
        contents = self.contents
        contents.tensor_bytes = sum(self._storages.values())
        contents.globals = sorted(self._uses.values(), key=lambda use: (use.danger is None, use.allowed, use.path))
        if contents.nested:
            contents.notes.append(
                "pickles inside of byte strings are listed too; they run only if something loads them"
            )
        if contents.kind == "torch tar file":
            contents.notes.append("torch.load(weights_only=True) refuses the tar format altogether")
        return contents
