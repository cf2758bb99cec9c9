"""Follows the opcodes of one pickle without running it: which globals it imports, and what it holds."""

from __future__ import annotations

import copyreg
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

__all__ = ["Global", "Import", "Trace", "follow"]

_TEXTS = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"}
_BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
_NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK, _UNKNOWN = object(), object()
COMPUTED = "(computed while loading)"


class Global(NamedTuple):
    """A name that a pickle imports, as it is written there."""

    module: str
    name: str


@dataclass(frozen=True)
class Import:
    """One place of a pickle that imports a name."""

    what: Global
    offset: int  # bytes from the start of this pickle
    protocol: int  # at that place; up to 2 the names are those of Python 2


@dataclass
class Trace:
    """What one pickle does.

    Attributes:
        protocol: as announced; 0 where nothing is.
        imports: every import, in order.
        persistent: the ids of what is stored outside, in order: tuples, texts, or None where they are computed.
        rebuilt: the calls of imported functions: (function, arguments or None).
        handed_on: the globals that are used otherwise than by being called at once.
        byte_strings: those that are long enough to hold a pickle.
        opcodes: the names of all opcodes that occur.
        value: the result, where it is a text, a number or a tuple of such; else None.
        size: bytes up to the end of the pickle, or to the place of the error.
        error: why it can't be followed further; None at a regular end.
    """

    protocol: int = 0
    imports: list[Import] = field(default_factory=list)
    persistent: list[Any] = field(default_factory=list)
    rebuilt: list[tuple[Global, Any]] = field(default_factory=list)
    handed_on: set[Global] = field(default_factory=set)
    byte_strings: list[bytes] = field(default_factory=list)
    opcodes: set[str] = field(default_factory=set)
    value: Any = None
    size: int = 0
    error: str | None = None


def follow(stream: IO[bytes]) -> Trace:
    """Follow the pickle at the stream's position to its end, and leave the stream there.

    >>> import io, pickle
    >>> trace = follow(io.BytesIO(pickle.dumps(range(3))))
    >>> trace.imports[0].what, trace.error
    (Global(module='builtins', name='range'), None)
    >>> follow(io.BytesIO(pickle.dumps(range(3))[:-1])).error
    'pickle exhausted before seeing STOP'
    """
    start = stream.tell()
    machine = _Machine()
    try:
        for opcode, argument, position in pickletools.genops(stream):
            machine.step(opcode, argument, (position or start) - start)
    except Exception as error:  # genops raises ValueError, UnicodeDecodeError, struct.error …, and a zip its own
        machine.trace.error = " ".join(str(error).split()) or type(error).__name__
    machine.trace.size = stream.tell() - start
    return machine.trace


class _Machine:
    """The unpickler's stack and memo, holding texts, numbers, tuples and globals; all else is unknown."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._offset = 0
        self._special: dict[str, Callable[[Any], object]] = {
            "PROTO": lambda version: setattr(self.trace, "protocol", version),
            "MARK": lambda _: self._stack.append(_MARK),
            "TUPLE": lambda _: self._stack.append(tuple(self._pop_to_mark())),
            "DUP": lambda _: self._stack.append(self._top()),
            "POP": lambda _: self._pop(keep_mark=False),
            "POP_MARK": lambda _: self._pop_to_mark(),
            "GLOBAL": lambda text: self._import(Global(*text.split(" ", 1))),
            "INST": self._inst,
            "STACK_GLOBAL": self._stack_global,
            "REDUCE": self._reduce,
            "PERSID": self._persid,
            "BINPERSID": lambda _: self._persid(self._pop()),
            "STOP": self._stop,
            **dict.fromkeys(("EXT1", "EXT2", "EXT4"), self._extension),
        }

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any, offset: int) -> None:
        self._offset = offset
        name = opcode.name
        self.trace.opcodes.add(name)
        if name in self._special:
            self._special[name](argument)
        elif name in _TEXTS or name in _NUMBERS:
            self._stack.append(argument)
        elif name in _BYTES:
            self._bytes(bytes(argument))
        elif name in _TUPLES:
            items = [self._pop() for _ in range(_TUPLES[name])]
            self._stack.append(tuple(reversed(items)))
        elif name in _PUTS:
            self._memo[len(self._memo) if argument is None else argument] = self._top()
        elif name in _GETS:
            self._stack.append(self._memo.get(argument, _UNKNOWN))
        else:
            self._other(opcode)

    def _other(self, opcode: pickletools.OpcodeInfo) -> None:
        """By what the opcode's own description says that it takes and leaves."""
        before = opcode.stack_before
        if pickletools.markobject in before:
            self._pop_to_mark()
            before = before[: before.index(pickletools.markobject)]
        for _ in before:
            self._pop()
        self._stack += [_UNKNOWN] * len(opcode.stack_after)

    def _top(self) -> Any:
        return self._stack[-1] if self._stack else _UNKNOWN

    def _pop(self, keep_mark: bool = True) -> Any:
        if not self._stack or (keep_mark and self._stack[-1] is _MARK):
            return _UNKNOWN
        return self._handed_on(self._stack.pop())

    def _handed_on(self, item: Any) -> Any:
        if isinstance(item, Global):
            self.trace.handed_on.add(item)
        return item

    def _pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while self._stack:
            item = self._stack.pop()
            if item is _MARK:
                break
            items.append(self._handed_on(item))
        return items[::-1]

    def _bytes(self, data: bytes) -> None:
        self._stack.append(data)
        if len(data) > 3:
            self.trace.byte_strings.append(data)

    def _import(self, what: Global) -> None:
        self.trace.imports.append(Import(what, self._offset, self.trace.protocol))
        self._stack.append(what)

    def _inst(self, text: str) -> None:
        self._pop_to_mark()
        self._import(Global(*text.split(" ", 1)))
        self._stack[-1] = _UNKNOWN

    def _stack_global(self, _: object) -> None:
        name, module = self._pop(), self._pop()
        known = [part if isinstance(part, str) else COMPUTED for part in (module, name)]
        self._import(Global(*known))

    def _extension(self, code: int) -> None:
        known = copyreg._inverted_registry.get(code)  # type: ignore[attr-defined]
        self._import(Global(*known) if known else Global("copyreg", f"extension {code} {COMPUTED}"))

    def _reduce(self, _: object) -> None:
        arguments = self._pop()
        function = self._stack.pop() if self._stack and self._stack[-1] is not _MARK else _UNKNOWN
        self._stack.append(_UNKNOWN)
        if not isinstance(function, Global):
            return
        self.trace.rebuilt.append((function, arguments if isinstance(arguments, tuple) else None))
        if function == ("_codecs", "encode") and isinstance(arguments, tuple) and arguments:
            text = arguments[0]  # how protocols 0 to 2 write bytes
            if isinstance(text, str) and all(ord(char) < 256 for char in text):
                self._stack.pop()
                self._bytes(text.encode("latin-1"))

    def _persid(self, key: Any) -> None:
        self.trace.persistent.append(key if isinstance(key, (tuple, str, int)) else None)
        self._stack.append(_UNKNOWN)

    def _stop(self, _: object) -> None:
        value = self._pop()
        self.trace.value = value if isinstance(value, (str, int, tuple)) else None
