"""Pickles without a zip around them: files of `torch.save` before 1.6, and plain `pickle.dump`."""

from __future__ import annotations

from typing import Any

from nanscan.errors import CorruptCheckpoint
from nanscan.files.entry import Contents
from nanscan.files.nodes import Persistent
from nanscan.files.notes import code_note
from nanscan.files.pickle_bytes import PickleBytes
from nanscan.files.pickle_machine import Machine
from nanscan.files.rebuild import Rebuild, Storage, storage_element
from nanscan.files.source import Part, Source
from nanscan.files.walk import find_entries

__all__ = ["packed_storage", "read_pickle"]

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
_MAX_KEYS = 1_000_000


class _LegacyStorages:
    """Storages that follow the pickle, in the order of a list of keys."""

    def __init__(self, stream: PickleBytes, machine: Machine) -> None:
        kinds = {_key(item): storage_element(item.key[1]) for item in machine.persistent if _is_storage(item)}
        keys = Machine(stream).load()
        if not isinstance(keys, list) or len(keys) > _MAX_KEYS:
            raise CorruptCheckpoint("the list of its storages is missing: it is cut off or damaged")
        self._stored: dict[str, Storage] = {}
        for key in map(str, keys):
            if key not in kinds:
                raise CorruptCheckpoint(f"storage {key[:40]} is in the file, but nothing refers to it")
            count = int.from_bytes(stream.read(8), "little", signed=True)
            size = count * kinds[key].itemsize
            if count < 0:
                raise CorruptCheckpoint(f"storage {key[:40]} claims {count} elements")
            start = stream.at
            stream.skip(size)
            self._stored[key] = Storage(key, Part(stream.source, start, size), kinds[key])

    def storage(self, reference: Persistent) -> Storage:
        if not _is_storage(reference):
            raise CorruptCheckpoint("a storage is referred to in an unknown way")
        key = _key(reference)
        if key not in self._stored:
            raise CorruptCheckpoint(f"storage {key[:40]} is missing: the file is cut off or damaged")
        return self._part(self._stored[key], reference.key[5] if len(reference.key) > 5 else None)

    def _part(self, whole: Storage, view: Any) -> Storage:
        if view is None:
            return whole
        if not (isinstance(view, tuple) and len(view) == 3 and all(type(number) is int for number in view[1:])):
            raise CorruptCheckpoint("a view of a storage is described in an unknown way")
        size = whole.element.itemsize
        name = f"{whole.key}/{str(view[0])[:40]}"
        return self._stored.setdefault(
            name, Storage(name, Part(whole.source, view[1] * size, view[2] * size), whole.element)
        )

    def packed(self, source: Source) -> Storage:
        return packed_storage(source)


class _NoStorages:
    """A plain pickle: every storage is packed into bytes of its own."""

    def __init__(self) -> None:
        self._known: dict[Any, Storage] = {}

    def storage(self, reference: Persistent) -> Storage:
        raise CorruptCheckpoint("it refers to storages outside of it: it is a part of another file")

    def packed(self, source: Source) -> Storage:
        return packed_storage(source)


def _is_storage(item: Persistent) -> bool:
    return isinstance(item.key, tuple) and len(item.key) >= 5 and item.key[0] == "storage"


def _key(item: Persistent) -> str:
    return str(item.key[2])[:200]


def packed_storage(source: Source) -> Storage:
    """The one storage in bytes that `torch.save` made of it (how a plain pickle keeps a tensor)."""
    stream = PickleBytes(source)
    if not _skip_header(stream):
        raise CorruptCheckpoint("a storage is packed in an unknown way")
    machine = Machine(stream)
    tree = machine.load()
    if not isinstance(tree, Persistent):
        tree = next((item for item in machine.persistent), None)
    if tree is None:
        raise CorruptCheckpoint("a storage is packed in an unknown way")
    return _LegacyStorages(stream, machine).storage(tree)


def _skip_header(stream: PickleBytes) -> bool:
    """Pass over the three pickles before the content of an old file; False if it doesn't begin like one."""
    if Machine(stream).load() != MAGIC:
        return False
    if Machine(stream).load() != PROTOCOL:
        raise CorruptCheckpoint("it claims to be written by another version of torch.save than any known")
    Machine(stream).load()
    return True


def read_pickle(source: Source, name: str | None = None) -> Contents:
    """The tensors of a file of `torch.save` before 1.6, or of a plain pickle.

    Args:
        source: the whole file.
        name: what its content is called; default by its kind.

    Raises:
        CorruptCheckpoint: it is damaged.
    """
    stream = PickleBytes(source)
    first = Machine(stream)
    tree = first.load()
    if tree == MAGIC and type(tree) is int:
        return _legacy(source)
    contents = Contents("pickle", find_entries(tree, Rebuild(_NoStorages()), name), code_note(first), source.size)
    budget, number = first.budget, 1
    while stream.left:
        at, machine = stream.at, Machine(stream, budget)
        try:
            tree = machine.load()
        except CorruptCheckpoint:
            contents.notes.append(f"{source.size - at} bytes follow the last pickle; they are not read")
            return contents
        contents.entries += find_entries(tree, Rebuild(_NoStorages()), f"pickle{number}")
        contents.notes += [note for note in code_note(machine) if note not in contents.notes]
        budget, number = machine.budget, number + 1
    return contents


def _legacy(source: Source) -> Contents:
    stream = PickleBytes(source)
    _skip_header(stream)
    machine = Machine(stream)
    tree = machine.load()
    storages = _LegacyStorages(stream, machine)
    return Contents("torch legacy", find_entries(tree, Rebuild(storages)), code_note(machine), source.size)
