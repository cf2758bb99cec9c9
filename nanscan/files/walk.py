"""Every tensor in the nodes of a pickle, with its path as a person would type it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from nanscan.errors import CorruptCheckpoint
from nanscan.files.arrays import Found
from nanscan.files.entry import Entry
from nanscan.files.nodes import Blob, Dict, Global, Object, Persistent, Set
from nanscan.files.rebuild import Rebuild

__all__ = ["find_entries"]

MAX_DEPTH = 500
MAX_VISITS = 4_000_000
MAX_NAMES = 100  # of one tensor
MAX_TEXT = 1 << 28  # characters of all names
MAX_KEY = 1000  # characters of one step
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_FLAT_ARGS = frozenset({
    "collections.deque", "collections.defaultdict", "collections.Counter", "builtins.set", "builtins.frozenset",
    "__builtin__.set", "builtins.list", "builtins.tuple",
})  # fmt: skip
_PAIRS = frozenset({"collections.OrderedDict", "builtins.dict"})
_Child = tuple[str, Any]
_Path = tuple[Any, str]  # the path of the owner, and what is added to it


def find_entries(root: Any, rebuild: Rebuild, name: str | None = None) -> list[Entry]:
    """The tensors under ``root``, each once, with all its names.

    Args:
        root: what the pickle describes.
        rebuild: knows what a tensor looks like.
        name: what the root is called; default by its kind: ``model``, ``state``, ``tensor`` or ``obj``.

    Raises:
        CorruptCheckpoint: a tensor is not right, or things are nested more than 500 deep.
    """
    walk = _Walk(rebuild)
    open_nodes = [iter([((None, name or _root_name(root)), root)])]
    bare = name is None
    while open_nodes:
        step = next(open_nodes[-1], None)
        if step is None:
            open_nodes.pop()
        elif walk.enters(*step):
            if len(open_nodes) > MAX_DEPTH:
                raise CorruptCheckpoint(f"its content is nested more than {MAX_DEPTH} deep: no checkpoint is")
            open_nodes.append(_below(*step, is_root=bare and len(open_nodes) == 1))
    return list(walk.entries.values())


class _Walk:
    """What was found up to now; every node is looked at once, however often it is referred to."""

    def __init__(self, rebuild: Rebuild) -> None:
        self.entries: dict[Any, Entry] = {}
        self._rebuild = rebuild
        self._found: dict[int, list[Entry]] = {}  # of the tensors among the nodes
        self._seen: set[int] = set()
        self._visits = 0
        self._text = 0

    def enters(self, path: _Path, node: Any) -> bool:
        """Take ``node`` if it is a tensor; True if it is something else, not seen before."""
        self._visits += 1
        if self._visits > MAX_VISITS:
            raise CorruptCheckpoint(f"its content refers to more than {MAX_VISITS} things: no checkpoint does")
        known = id(node) in self._seen
        self._seen.add(id(node))
        found = self._rebuild.find(node) if not known else None
        if found is not None:
            self._found[id(node)] = [self._add(item, self._name(path, item.suffix)) for item in found]
        elif id(node) in self._found:
            self._again(path, self._found[id(node)])
        return found is None and not known

    def _add(self, found: Found, name: str) -> Entry:
        entry = found.entry
        key: Any = (id(entry.source), entry.view, entry.element.name, entry.shape, bool(entry.build))
        if entry.source is None or entry.view is None or entry.view.numel == 0:
            key = len(self.entries)
        first = self.entries.setdefault(key, entry)
        _also(first, name)
        return first

    def _again(self, path: _Path, entries: list[Entry]) -> None:
        if len(entries) == 1 and len(entries[0].names) < MAX_NAMES:
            _also(entries[0], self._name(path, ""))

    def _name(self, path: _Path, suffix: str) -> str:
        text = _text(path, suffix)
        self._text += len(text)
        if self._text > MAX_TEXT:
            raise CorruptCheckpoint("the names of its tensors take more than 256 MiB: no checkpoint's do")
        return text


def _also(entry: Entry, name: str) -> None:
    if len(entry.names) < MAX_NAMES and name not in entry.names:
        entry.names.append(name)


def _below(path: _Path, node: Any, *, is_root: bool) -> Iterator[tuple[_Path, Any]]:
    """The children of a node that may be or hold tensors."""
    for (step, bare), child in _steps(node, is_root=is_root):
        if isinstance(child, (list, tuple, Dict, Set, Object, Persistent)) and not isinstance(child, (Global, Blob)):
            yield ((None, bare) if step is None else (path, step)), child


def _text(path: _Path | None, suffix: str) -> str:
    parts = [suffix]
    while path is not None:
        path, step = path
        parts.append(step)
    return "".join(reversed(parts))


def _root_name(root: Any) -> str:
    if isinstance(root, Object):
        if _is_module(root):
            return "model"
        if root.called.startswith("__torch__."):
            return "model"
        return "state" if root.called in _PAIRS | _FLAT_ARGS else "tensor" if _looks_tensor(root) else "obj"
    return "state" if isinstance(root, Dict) else "obj"


def _looks_tensor(root: Object) -> bool:
    return root.called.startswith(("torch._utils._rebuild", "torch._tensor._rebuild", "numpy."))


def _steps(node: Any, *, is_root: bool) -> Iterator[tuple[tuple[str | None, str], Any]]:
    """Each child and what leads to it; a tensor right under a root dict goes by its key alone, as in `nanscan.scan`."""
    for step, child in _children(node):
        if isinstance(step, tuple):  # an entry of a dict
            key = step[0]
            if is_root and isinstance(key, str) and _is_leaf(child):
                yield (None, key[:MAX_KEY]), child
            else:
                yield (f"[{_key(key)}]", ""), child
        else:
            yield (step, ""), child


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Persistent) or (isinstance(node, Object) and _looks_tensor(node))


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, Persistent):  # a storage has no children
        return
    if isinstance(node, (list, tuple)):
        yield from ((f"[{i}]", item) for i, item in enumerate(node))
    elif isinstance(node, Set):
        yield from ((f"[{i}]", item) for i, item in enumerate(node.items))
    elif isinstance(node, Dict):
        yield from _pairs(node.pairs)
    elif isinstance(node, Object):
        yield from _of_object(node)


def _pairs(pairs: list[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    for i, (key, value) in enumerate(pairs):
        if isinstance(key, (Object, tuple)):
            yield f"[key {i}]", key
        yield (key,), value


def _of_object(node: Object) -> Iterator[tuple[Any, Any]]:
    yield from _of_args(node)
    yield from ((f"[{i}]", item) for i, item in enumerate(node.items))
    yield from _pairs(node.pairs)
    if isinstance(node.kwargs, Dict):
        yield from ((f".{_plain(key)}", value) for key, value in node.kwargs.pairs)
    state = node.state
    if node.called.endswith("._reconstruct") and isinstance(state, tuple) and state and isinstance(state[-1], list):
        yield from ((f"[{i}]", item) for i, item in enumerate(state[-1]))  # an array of objects
        return
    both = state if isinstance(state, tuple) and len(state) == 2 and _dicts(state) else (state,)
    for part in both:
        if isinstance(part, Dict):
            yield from _attributes(part, is_module=_is_module(node))
        elif part is not None:
            yield ".__state__", part


def _dicts(parts: tuple[Any, ...]) -> bool:
    return all(part is None or isinstance(part, Dict) for part in parts)


def _of_args(node: Object) -> Iterator[tuple[Any, Any]]:
    args = node.args if isinstance(node.args, tuple) else (node.args,)
    if node.called in _PAIRS and len(args) == 1 and isinstance(args[0], list):
        yield from _pairs([tuple(pair) for pair in args[0] if isinstance(pair, (list, tuple)) and len(pair) == 2])
    elif node.called in _FLAT_ARGS:
        yield from (("", arg) for arg in args)
    else:
        yield from ((f"[{i}]" if node.new else f".args[{i}]", arg) for i, arg in enumerate(args))


def _is_module(node: Object) -> bool:
    state = node.state
    return isinstance(state, Dict) and state.get("_modules") is not None and state.get("_parameters") is not None


def _attributes(state: Dict, *, is_module: bool) -> Iterator[tuple[Any, Any]]:
    for key, value in state.pairs:
        if is_module and key in _MODULE_PARTS and isinstance(value, (Dict, Object)):
            yield from ((_child(name), child) for name, child in _all_pairs(value))
        else:
            yield f".{_plain(key)}", value


def _all_pairs(node: Dict | Object) -> list[tuple[Any, Any]]:
    if isinstance(node, Dict):
        return node.pairs
    old = node.args[0] if isinstance(node.args, tuple) and len(node.args) == 1 else None
    listed = [tuple(pair) for pair in old if isinstance(pair, list) and len(pair) == 2] if isinstance(old, list) else []
    return [*listed, *node.pairs]


def _child(name: Any) -> str:
    text = _plain(name)
    return f"[{text}]" if text.isdecimal() else f".{text}"


def _plain(key: Any) -> str:
    return key[:MAX_KEY] if isinstance(key, str) else _key(key)


def _key(key: Any) -> str:
    """A dict's key as typed."""
    if isinstance(key, str):
        return json.dumps(key[:MAX_KEY], ensure_ascii=False)
    if isinstance(key, Global):
        return key.full
    if key is None or isinstance(key, (bool, int, float, bytes)):
        return repr(key[:MAX_KEY] if isinstance(key, bytes) else key)
    if isinstance(key, tuple) and not isinstance(key, (Blob, Persistent)) and len(key) < 10:
        return f"({', '.join(_key(part) if not isinstance(part, tuple) else '…' for part in key)})"
    return "…"
