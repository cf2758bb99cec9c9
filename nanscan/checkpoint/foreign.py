"""Files without digests: is it a torch archive at all, are its sums right, and what can not be loaded from it?"""

from __future__ import annotations

import io
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

from nanscan.checkpoint import layout
from nanscan.errors import CheckpointError, CheckpointWarning, CorruptCheckpoint
from nanscan.foreign_files import kind_by_head, kind_by_members
from nanscan.messages import warn
from nanscan.pickling.byname import on_path
from nanscan.pickling.safe_globals import allowed, resolve
from nanscan.pickling.stream import inspect_pickle
from nanscan.pickling.weights_only import expression
from nanscan.pickling.where import Needs, needs_of

__all__ = ["check_archive", "is_legacy", "missing_class", "path_of_another_system", "refusal"]

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how torch.save began a file before 1.6
_CHUNK = 1 << 20
_NAMED = 5
_MOST = 64 << 20  # bytes of a pickle that is looked into for places
_KNOWN = {b"\x89HDF": "an HDF5 file: give it the suffix .h5", b"\x93NUMPY": "a NumPy array file"}


def check_archive(fd: int, path: str, verify: bool) -> None:
    """Raise unless the file looks like torch's and its own check sums, if asked for, are right."""
    size = os.fstat(fd).st_size
    head = os.pread(fd, 32, 0)
    if not head.startswith(b"PK\3\4"):
        _check_head(head, path)
        return
    try:
        members = layout.members_of(layout.read_directory(fd, size))
    except (layout.NotAnArchive, ValueError, OverflowError) as error:
        raise CorruptCheckpoint(f"{path!r} is corrupt: {error}. Use an older checkpoint or another copy.") from None
    names = {member.name.partition("/")[2] for member in members}
    if "constants.pkl" in names:
        raise CheckpointError(f"{path!r} is a TorchScript archive: load it with torch.jit.load")
    if "data.pkl" not in names:
        what = kind_by_members(member.name for member in members)
        raise CorruptCheckpoint(
            f"{path!r} is no checkpoint: it is {what}"
            if what
            else f"{path!r} is a zip archive, but no checkpoint: it has no data.pkl"
        )
    if verify:
        _check_sums(fd, path)


def is_legacy(fd: int) -> bool:
    """Whether the open file has torch's format from before 1.6, in which nothing is verified."""
    return os.pread(fd, len(_LEGACY), 0) == _LEGACY


def _check_head(head: bytes, path: str) -> None:
    if head.startswith(_LEGACY):
        warn(
            f"{path!r} has the format of torch before 1.6, without check sums: it is loaded unverified. Save it again.",
            CheckpointWarning,
        )
        return
    raise CorruptCheckpoint(f"{path!r} is no checkpoint: it {_looks_like(head)}")


def _looks_like(head: bytes) -> str:
    if not head:
        return "is empty (0 bytes)"
    if not head.strip(b"\0"):
        return "begins with zeros, as a file does whose content never reached the disk"
    known = next((text for start, text in _KNOWN.items() if head.startswith(start)), None) or kind_by_head(head)
    if known:
        return f"is {known}"
    if head[8:9] == b"{" and head[6:8] == b"\0\0":  # the length of a header, then the header
        return "is a safetensors file: give it the suffix .safetensors"
    if re.match(rb"\x80[\x02-\x05]", head):
        return "is a plain pickle, which is not opened because it may run code"
    if all(byte >= 32 or byte in b"\t\r\n" for byte in head):
        return f"is text: {head[:20].decode('utf-8', 'replace')!r}"
    return f"is no zip archive (first bytes {head[:4].hex(' ')})"


def _check_sums(fd: int, path: str) -> None:
    try:
        with os.fdopen(os.dup(fd), "rb") as file, zipfile.ZipFile(file) as archive:
            bad = [item.filename for item in archive.infolist() if not _sum_is_right(fd, item)]
    except (zipfile.BadZipFile, layout.NotAnArchive, ValueError) as error:
        raise CorruptCheckpoint(f"{path!r} is corrupt: {error}. Use an older checkpoint or another copy.") from None
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise CorruptCheckpoint(
            f"{path!r} is corrupt: the bytes of {', '.join(bad[:5])}{more} don't have their CRC-32 sum. Use an older "
            "checkpoint or another copy."
        )


def _sum_is_right(fd: int, item: Any) -> bool:
    if item.compress_type != zipfile.ZIP_STORED:
        return True  # torch checks what it unpacks
    at = layout.data_start(os.pread(fd, 30, item.header_offset), item.header_offset)
    left, crc = item.file_size, 0
    while left:
        data = os.pread(fd, min(_CHUNK, left), at)
        if not data:
            return False
        crc, at, left = zlib.crc32(data, crc), at + len(data), left - len(data)
    return bool(crc == item.CRC)


def refusal(path: str, error: Exception) -> CheckpointError:
    """The error for what ``weights_only=True`` refuses: every name that the file imports and that is not allowed."""
    try:
        found = inspect_pickle(path)
    except Exception:  # what torch says has to do
        return CheckpointError(f"{path!r} is refused by weights_only=True: {_said(error)}")
    if found.error:
        return CorruptCheckpoint(f"{path!r} is corrupt: {found.error}. Use an older checkpoint or another copy.")
    dangers = [use.danger for use in found.dangerous if use.danger]
    if dangers:
        return CheckpointError(
            f"{path!r} would run code when it is unpickled: {'; '.join(dangers[:5])}. It is not loaded; do not load it "
            "with weights_only=False unless you made it yourself"
        )
    needs = _needs(path)
    refused = [use.path for use in found.refused]
    refused += [name for name in needs.unnamed if not allowed(name)]
    made = re.search(r"allowlisted via .*but got <class '([\w.]+)'>", str(error))
    if not refused and made:  # by a function that is allowed
        refused = [made[1]]
    if not refused:
        unknown = f"it does not know the opcode {', '.join(found.opcodes)}" if found.opcodes else _said(error)
        return CheckpointError(f"{path!r} is refused by weights_only=True: {unknown}")
    names = ", ".join(name.removeprefix("builtins.") for name in refused)
    allow = f"allow it with torch.serialization.add_safe_globals([{', '.join(map(expression, refused))}]), or "
    if found.opcodes or needs.filled.intersection(refused):
        allow = ""  # no allowlist helps
    gone = [name for name in refused if not _can_be_found(name)]
    moved = (
        f". {', '.join(gone)} can't be imported here: allow what has become of it, as "
        f"(new.{gone[0].rpartition('.')[2]}, {gone[0]!r})"
        if gone and allow
        else ""
    )
    return CheckpointError(
        f"{path!r} holds {names}{_where(needs, refused)}, which weights_only=True refuses because unpickling it may "
        f"run code. Convert it where the file is made (to numbers, strings, lists, tensors); or, if you trust it, "
        f"{allow}load with weights_only=False{moved}"
    )


def _can_be_found(name: str) -> bool:
    """Whether the module of a global may be imported here; nothing is imported to find out."""
    top, module = name.partition(".")[0], name.rpartition(".")[0]
    if resolve(name) is not None or module in sys.modules:
        return resolve(name) is not None
    return top in sys.modules or on_path(top)


def path_of_another_system(path: str, error: Exception) -> CheckpointError | None:
    """The error for a pathlib path that was saved on Windows and is loaded elsewhere, or the other way round."""
    said = re.search(r"cannot instantiate '(WindowsPath|PosixPath)' on your system", str(error))
    if said is None:
        return None
    name = said[1]
    where = _where(_needs(path), [f"pathlib.{name}", f"pathlib._local.{name}"])
    return CheckpointError(
        f"{path!r} holds a path of another operating system, pathlib.{name}{where}, which can't be made here: set "
        f"pathlib.{name} = pathlib.Pure{name} while it is loaded; or load it with weights_only=True under "
        f"torch.serialization.safe_globals([{expression(f'pathlib.{name}')}]). Store str(path) the next time"
    )


def missing_class(path: str, error: ImportError | AttributeError) -> CheckpointError | None:
    """The error for a class of the file that can't be imported; None if ``error`` is about something else."""
    attribute = re.match(r"Can't get attribute '([^']+)' on <module '([^']+)'", str(error))
    if attribute is None and not isinstance(error, ModuleNotFoundError):
        return None
    module = attribute.group(2) if attribute else str(error.name)
    try:
        used = [use.path for use in inspect_pickle(path).globals]
    except Exception:
        return None
    wanted = f"{module}.{attribute.group(1)}" if attribute else ""
    names = [name for name in used if name == wanted or (not wanted and f"{name}.".startswith(f"{module}."))]
    if not names:
        return None  # the user's own code, which loading runs, fails
    how = (
        "define it in this script before loading"
        if module == "__main__"
        else f"make it importable under that name (if it has moved: sys.modules[{module!r}] = where it is now)"
    )
    where = _where(_needs(path), names)
    return CheckpointError(
        f"{path!r} holds {', '.join(names)}{where}, which can't be imported here ({error}): {how}, then "
        "save state_dict() instead, which needs no class"
    )


def _said(error: Exception) -> str:
    """What torch's loader says beyond its general advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [i for i, line in enumerate(lines) if "WeightsUnpickler error:" in line]
    rest = " ".join(lines[own[0] : own[0] + 2]).partition("WeightsUnpickler error:")[2].strip() if own else ""
    return rest or (lines[0] if lines else type(error).__name__)


def _needs(path: str) -> Needs:
    """What loading it takes; nothing where that can't be told."""
    try:
        with zipfile.ZipFile(path) as archive:
            (member,) = [item for item in archive.infolist() if item.filename.endswith("/data.pkl")]
            if member.file_size > _MOST:
                return Needs()
            with archive.open(member) as stream:
                return needs_of(io.BytesIO(stream.read()), "state")
    except Exception:  # an old format, or nothing that pickle itself could follow
        return Needs()


def _where(needs: Needs, names: Sequence[str]) -> str:
    """The first places of the names in the saved object; nothing where they can't be told."""
    places = {**needs.unnamed, **needs.places}
    found = list(dict.fromkeys(places[name] for name in names if name in places))
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f" (at {', '.join(found[:_NAMED])}{more})" if found else ""
