"""Files of `torch.save` and of TorchScript: a zip with a pickle and one member for each storage."""

from __future__ import annotations

import struct
import zipfile
from typing import Any

from nanscan.errors import CorruptCheckpoint
from nanscan.files import torch_legacy
from nanscan.files.entry import Contents, Entry
from nanscan.files.nodes import Persistent
from nanscan.files.notes import code_note
from nanscan.files.pickle_bytes import PickleBytes
from nanscan.files.pickle_machine import Machine
from nanscan.files.rebuild import Rebuild, Storage, storage_element
from nanscan.files.source import Compressed, FileBytes, Part, Source, read_bytes
from nanscan.files.walk import find_entries

__all__ = ["ZipMembers", "read_torch_zip"]

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 0x1


class ZipMembers:
    """The members of a zip, each as a `Source`; stored ones are read where they lie.

    Args:
        file: the whole file.

    Raises:
        CorruptCheckpoint: no readable directory, two members of one name, or members that overlap (a zip bomb).
    """

    def __init__(self, file: FileBytes) -> None:
        self.file = file
        try:
            self.archive = zipfile.ZipFile(file.file)
        except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OverflowError, OSError) as error:
            raise CorruptCheckpoint(f"its zip directory cannot be read ({error}): it is cut off or damaged") from error
        self.members = {member.filename: member for member in self.archive.infolist()}
        if len(self.members) != len(self.archive.infolist()):
            raise CorruptCheckpoint("its zip directory lists a name twice")
        self._check_places()

    def _check_places(self) -> None:
        end, before = 0, ""
        for member in sorted(self.members.values(), key=lambda item: item.header_offset):
            if member.header_offset < end:
                raise CorruptCheckpoint(f"its members {before!r} and {member.filename!r} overlap")
            end, before = member.header_offset + 30 + member.compress_size, member.filename
        if end > self.file.size:
            raise CorruptCheckpoint(f"its member {before!r} ends behind the end of the file")

    def source(self, name: str) -> Source:
        """The bytes of a member."""
        member = self.members.get(name)
        if member is None:
            raise CorruptCheckpoint(f"its member {name!r} is missing")
        if member.flag_bits & _ENCRYPTED:
            raise CorruptCheckpoint(f"its member {name!r} is encrypted")
        if member.compress_type != zipfile.ZIP_STORED:
            return Compressed(self.archive, member)
        if member.compress_size != member.file_size:
            raise CorruptCheckpoint(f"its member {name!r} has two different sizes")
        return Part(self.file, self._data_offset(member), member.file_size)

    def _data_offset(self, member: zipfile.ZipInfo) -> int:
        magic, name, extra = _LOCAL_HEADER.unpack(read_bytes(self.file, member.header_offset, _LOCAL_HEADER.size))
        if magic != b"PK\x03\x04":
            raise CorruptCheckpoint(f"its member {member.filename!r} does not begin where the directory says")
        return int(member.header_offset + _LOCAL_HEADER.size + name + extra)

    @property
    def held(self) -> int:
        """How many bytes all members hold, unpacked."""
        return sum(member.file_size for member in self.members.values())


class _ZipStorages:
    def __init__(self, zipped: ZipMembers, folder: str) -> None:
        self._zipped = zipped
        self._folder = folder
        self._sources: dict[str, Source] = {}
        self._big_endian = _is_big_endian(zipped, folder.partition("/")[0])

    def storage(self, reference: Persistent) -> Storage:
        key = reference.key
        if not (isinstance(key, tuple) and len(key) >= 5 and key[0] == "storage"):
            raise CorruptCheckpoint("a storage is referred to in an unknown way")
        element, name, count = storage_element(key[1]), str(key[2])[:200], key[4]
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = self._zipped.source(f"{self._folder}/{name}")
        if type(count) is not int or not 0 <= count * element.itemsize <= source.size:
            raise CorruptCheckpoint(
                f"storage {name} should hold {str(count)[:40]} elements of {element.name}, but has {source.size} bytes"
            )
        return Storage(name, source, element, self._big_endian)

    def packed(self, source: Source) -> Storage:
        return torch_legacy.packed_storage(source)


def _is_big_endian(zipped: ZipMembers, root: str) -> bool:
    name = f"{root}/byteorder"
    if name not in zipped.members:
        return False
    source = zipped.source(name)
    return bytes(read_bytes(source, 0, min(source.size, 6))) == b"big"


def read_torch_zip(zipped: ZipMembers) -> Contents:
    """The tensors of a file that `torch.save` or `torch.jit.save` wrote.

    Raises:
        CorruptCheckpoint: it is damaged.
    """
    pickles = [name for name in zipped.members if name.endswith((".pkl",)) and name.count("/") == 1]
    script = any(name.endswith("/constants.pkl") for name in pickles)
    contents = Contents("TorchScript" if script else "torch zip", [], held=zipped.held)
    for name in pickles:
        if name.endswith(("/data.pkl", "/constants.pkl")):
            contents.entries += _pickled(zipped, name, contents.notes)
    return contents


def _pickled(zipped: ZipMembers, name: str, notes: list[str]) -> list[Entry]:
    root, _, file = name.partition("/")
    machine = Machine(PickleBytes(zipped.source(name)))
    tree: Any = machine.load()
    folder = f"{root}/data" if file == "data.pkl" else f"{root}/constants"
    notes += code_note(machine)
    return find_entries(tree, Rebuild(_ZipStorages(zipped, folder)), "constants" if file == "constants.pkl" else None)
