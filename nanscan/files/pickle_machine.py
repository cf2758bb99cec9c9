"""A pickle machine that builds inert data: no import, no call, no hashing, bounded memory, any nesting."""

from __future__ import annotations

import ast
import struct
from collections.abc import Callable
from typing import Any

from nanscan.errors import CorruptCheckpoint
from nanscan.files.nodes import Blob, Dict, Global, Object, Persistent, Set
from nanscan.files.pickle_bytes import PickleBytes

__all__ = ["MAX_OBJECTS", "Machine"]

MAX_OBJECTS = 2_000_000  # lists, dicts, tuples, calls …: some 300 MB in memory
MAX_STEPS = 20_000_000  # ten seconds
_DOUBLE = struct.Struct(">d")
_INT = struct.Struct("<i")
_MISSING = object()
Step = Callable[["Machine"], None]


class Machine:
    """Runs one pickle.

    Args:
        stream: where it lies; afterwards at its end.
        budget: how many containers and calls it may make.

    Attributes:
        globals: every name that unpickling would import.
        called: those of them that it would call.
        persistent: every reference to something outside.
    """

    def __init__(self, stream: PickleBytes, budget: int = MAX_OBJECTS) -> None:
        self.stream = stream
        self.budget = budget
        self.globals: dict[tuple[str, str], Global] = {}
        self.called: set[str] = set()
        self.persistent: list[Persistent] = []
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """The object described, as nodes.

        Raises:
            CorruptCheckpoint: it is no complete, valid pickle.
        """
        read, steps = self.stream.read, _STEPS
        try:
            for _ in range(MAX_STEPS):
                code = read(1)[0]
                if code == 0x2E:  # STOP
                    return self.pop()
                step = steps.get(code)
                if step is None:
                    raise CorruptCheckpoint(f"byte {self.stream.at - 1} is {code:#04x}: no instruction of a pickle")
                step(self)
            raise CorruptCheckpoint(f"the pickle takes more than {MAX_STEPS} instructions: no checkpoint does")
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, SyntaxError, OverflowError) as error:
            detail = f"{type(error).__name__}: {error}"[:100]
            raise CorruptCheckpoint(f"the pickle is not valid at byte {self.stream.at} ({detail})") from error

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        if not self._stack:
            raise CorruptCheckpoint(f"the pickle is not valid at byte {self.stream.at}: nothing is on its stack")
        return self._stack.pop()

    @property
    def top(self) -> Any:
        return self._stack[-1]

    def mark(self) -> None:
        self._spend(1)
        self._marks.append(self._stack)
        self._stack = []

    def to_mark(self) -> list[Any]:
        """What was pushed since the last mark."""
        if not self._marks:
            raise CorruptCheckpoint(f"the pickle is not valid at byte {self.stream.at}: a mark is missing")
        items, self._stack = self._stack, self._marks.pop()
        return items

    def made(self, value: Any) -> None:
        """Push a new container or call."""
        self._spend(1)
        self._stack.append(value)

    def _spend(self, count: int) -> None:
        self.budget -= count
        if self.budget < 0:
            raise CorruptCheckpoint(f"the pickle holds more than {MAX_OBJECTS} objects: no checkpoint does")

    def named(self, module: Any, name: Any) -> None:
        """Push a global."""
        if not (type(module) is str and type(name) is str and len(module) + len(name) < 2000):
            raise CorruptCheckpoint(f"the pickle is not valid at byte {self.stream.at}: a global without a name")
        self.push(self.globals.setdefault((module, name), Global(module, name)))

    def call(self, function: Any, args: Any, *, new: bool = False, kwargs: Any = None) -> None:
        """Push what calling would make."""
        if isinstance(function, Global):
            self.called.add(function.full)
        self.made(Object(function, args, new=new, kwargs=kwargs))

    def build(self) -> None:
        state, target = self.pop(), self.top
        if isinstance(target, Object):
            target.state = state

    def extend(self, items: list[Any]) -> None:
        target = self.top
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, (Object, Set)):
            target.items.extend(items)
        else:
            raise CorruptCheckpoint(f"the pickle is not valid at byte {self.stream.at}: it extends what is no list")

    def update(self, items: list[Any]) -> None:
        target = self.top
        if not isinstance(target, (Dict, Object)) or len(items) % 2:
            raise CorruptCheckpoint(f"the pickle is not valid at byte {self.stream.at}: it fills what is no dict")
        self._spend(len(items) // 2)
        target.pairs.extend(zip(items[::2], items[1::2], strict=True))

    def remember(self, index: int) -> None:
        self._memo[index] = self.top

    def recall(self, index: int) -> None:
        value = self._memo.get(index, _MISSING)
        if value is _MISSING:
            raise CorruptCheckpoint(f"the pickle is not valid at byte {self.stream.at}: nothing was kept as {index}")
        self.push(value)

    def memoize(self) -> None:
        self.remember(len(self._memo))

    def refer(self, key: Any) -> None:
        if isinstance(key, tuple) and len(key) > 1 and key[0] == "module":  # old files keep a class with its source
            self.push(key[1])
            return
        value = Persistent(key)
        self.persistent.append(value)
        self.made(value)

    def text_line(self) -> str:
        return self.stream.line().decode("utf-8", "surrogateescape")


def _dict_of(items: list[Any]) -> Dict:
    result = Dict()
    result.pairs.extend(zip(items[::2], items[1::2], strict=True))
    return result


def _quoted(line: bytes) -> bytes:
    """The bytes that a protocol 0 string of Python 2 stands for."""
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in b"'\"":
        raise ValueError("a text without quotes")
    value = ast.literal_eval("b" + line.decode("ascii"))
    return bytes(value)


def _python2(data: bytes | Blob) -> str | Blob:
    """A str of Python 2: mostly a name; an array's bytes survive the decoding too."""
    return data.decode("latin-1") if isinstance(data, bytes) else data


def _int_line(m: Machine) -> None:
    line = m.stream.line()
    m.push({b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line[:400], 0))


def _setitem(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    m.update([key, value])


def _append(m: Machine) -> None:
    m.extend([m.pop()])


def _reduce(m: Machine) -> None:
    args, function = m.pop(), m.pop()
    m.call(function, args)


def _newobj(m: Machine) -> None:
    args, cls = m.pop(), m.pop()
    m.call(cls, args, new=True)


def _newobj_ex(m: Machine) -> None:
    kwargs, args, cls = m.pop(), m.pop(), m.pop()
    m.call(cls, args, new=True, kwargs=kwargs)


def _inst(m: Machine) -> None:
    module, name = m.text_line(), m.text_line()
    m.named(module, name)
    function = m.pop()
    m.call(function, tuple(m.to_mark()))


def _obj(m: Machine) -> None:
    function, *args = m.to_mark()
    m.call(function, tuple(args))


def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    m.named(module, name)


def _tuple(count: int) -> Step:
    def step(m: Machine) -> None:
        items = [m.pop() for _ in range(count)]
        m.made(tuple(reversed(items)))

    return step


def _popped(m: Machine) -> None:
    if m._stack:
        m.pop()
    else:
        m.to_mark()


def _extension(width: int) -> Step:
    def step(m: Machine) -> None:
        number = int.from_bytes(m.stream.read(width), "little")
        m.named("copyreg", f"extension {number}")

    return step


def _out_of_band(m: Machine) -> None:
    raise CorruptCheckpoint("the pickle keeps its arrays outside the file (out-of-band buffers)")


def _proto(m: Machine) -> None:
    version = m.stream.read(1)[0]
    if version > 5:
        raise CorruptCheckpoint(f"the pickle claims protocol {version}; there are 0 to 5")


def _drop(m: Machine) -> None:
    m.to_mark()


def _frame(m: Machine) -> None:
    m.stream.read(8)  # its length, which nothing depends on


def _unicode_line(m: Machine) -> None:
    m.push(m.stream.line().decode("raw-unicode-escape"))


_STEPS: dict[int, Step] = {
    ord("("): Machine.mark,
    ord("0"): _popped,
    ord("1"): _drop,
    ord("2"): lambda m: m.push(m.top),
    ord("F"): lambda m: m.push(float(m.stream.line()[:400])),
    ord("I"): _int_line,
    ord("J"): lambda m: m.push(_INT.unpack(m.stream.read(4))[0]),
    ord("K"): lambda m: m.push(m.stream.read(1)[0]),
    ord("L"): lambda m: m.push(int(m.stream.line()[:400].rstrip(b"L"), 0)),
    ord("M"): lambda m: m.push(int.from_bytes(m.stream.read(2), "little")),
    ord("N"): lambda m: m.push(None),
    ord("P"): lambda m: m.refer(m.text_line()),
    ord("Q"): lambda m: m.refer(m.pop()),
    ord("R"): _reduce,
    ord("S"): lambda m: m.push(_quoted(m.stream.line().strip()).decode("latin-1")),
    ord("T"): lambda m: m.push(_python2(m.stream.data(4))),
    ord("U"): lambda m: m.push(_python2(m.stream.data(1))),
    ord("V"): _unicode_line,
    ord("X"): lambda m: m.push(m.stream.text(4)),
    ord("a"): _append,
    ord("b"): Machine.build,
    ord("c"): lambda m: m.named(m.text_line(), m.text_line()),
    ord("d"): lambda m: m.made(_dict_of(m.to_mark())),
    ord("}"): lambda m: m.made(Dict()),
    ord("e"): lambda m: m.extend(m.to_mark()),
    ord("g"): lambda m: m.recall(int(m.stream.line()[:20])),
    ord("h"): lambda m: m.recall(m.stream.read(1)[0]),
    ord("i"): _inst,
    ord("j"): lambda m: m.recall(m.stream.sized(4)),
    ord("l"): lambda m: m.made(m.to_mark()),
    ord("]"): lambda m: m.made([]),
    ord("o"): _obj,
    ord("p"): lambda m: m.remember(int(m.stream.line()[:20])),
    ord("q"): lambda m: m.remember(m.stream.read(1)[0]),
    ord("r"): lambda m: m.remember(m.stream.sized(4)),
    ord("s"): _setitem,
    ord("t"): lambda m: m.made(tuple(m.to_mark())),
    ord(")"): lambda m: m.push(()),
    ord("u"): lambda m: m.update(m.to_mark()),
    ord("G"): lambda m: m.push(_DOUBLE.unpack(m.stream.read(8))[0]),
    0x80: _proto,
    0x81: _newobj,
    0x82: _extension(1),
    0x83: _extension(2),
    0x84: _extension(4),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    0x8A: lambda m: m.push(m.stream.number(1)),
    0x8B: lambda m: m.push(m.stream.number(4)),
    ord("B"): lambda m: m.push(m.stream.data(4)),
    ord("C"): lambda m: m.push(m.stream.data(1)),
    0x8C: lambda m: m.push(m.stream.text(1)),
    0x8D: lambda m: m.push(m.stream.text(8)),
    0x8E: lambda m: m.push(m.stream.data(8)),
    0x8F: lambda m: m.made(Set([])),
    0x90: lambda m: m.extend(m.to_mark()),
    0x91: lambda m: m.made(Set(m.to_mark())),
    0x92: _newobj_ex,
    0x93: _stack_global,
    0x94: Machine.memoize,
    0x95: _frame,
    0x96: lambda m: m.push(m.stream.data(8)),
    0x97: _out_of_band,
    0x98: lambda m: None,
}
