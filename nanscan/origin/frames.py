"""From the Python stack to the user's own line: which frames are PyTorch's or ours, and what a line says."""

from __future__ import annotations

import linecache
import os
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

__all__ = ["INTERNAL", "LIBRARY", "USER", "Place", "Source", "owner_of", "place_of", "source_of"]

INTERNAL, USER, LIBRARY = 0, 1, 2

_PACKAGE = Path(__file__).parent.parent
_OURS = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, _PACKAGE))
_DEMO = str(_PACKAGE / "demo") + os.sep
_STDLIB = str(Path(sysconfig.get_path("stdlib"))) + os.sep
_SITE = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_GENERATED = ("<frozen", "<torch", "<eval_with_key", "<__array_function__", "<@beartype")

_owners: dict[CodeType, int] = {}


class Place(NamedTuple):
    """Where in the user's code an op was called; the code object and an offset, resolved only when asked for."""

    code: CodeType | None
    offset: int
    installed: CodeType | None = None  # the frame nearest to the op, where that is of an installed library
    installed_offset: int = 0


class Source(NamedTuple):
    """A line of source."""

    file: str | None = None
    line: int | None = None
    code: str = ""


def owner_of(code: CodeType) -> int:
    """Whether a function is PyTorch's or ours (`INTERNAL`), the user's own, or of another installed `LIBRARY`."""
    owner = _owners.get(code)
    if owner is None:
        owner = _owners[code] = _judge(code.co_filename)
    return owner


def _judge(file: str) -> int:
    if file.startswith(_DEMO):
        return USER
    if file.startswith(_OURS) or file.startswith(_GENERATED):
        return INTERNAL
    if any(part in file for part in _SITE):
        return LIBRARY
    return INTERNAL if file.startswith(_STDLIB) else USER


def place_of(frame: FrameType | None) -> Place:
    """The user's nearest frame from `frame` outwards; a library's if there is none of the user's."""
    library: CodeType | None = None
    offset = 0
    while frame is not None:
        code = frame.f_code
        owner = _owners.get(code)
        if owner is None:
            owner = owner_of(code)
        if owner == USER:
            return Place(code, frame.f_lasti, library, offset)
        if owner == LIBRARY and library is None:
            library, offset = code, frame.f_lasti
        frame = frame.f_back
    return Place(None, 0, library, offset)


def source_of(code: CodeType | None, offset: int) -> Source:
    """File, line number and text of an instruction.

    >>> source_of(None, 0)
    Source(file=None, line=None, code='')
    """
    if code is None:
        return Source()
    line = next((n for start, end, n in code.co_lines() if start <= offset < end), None) or code.co_firstlineno
    return Source(code.co_filename, line, linecache.getline(code.co_filename, line).strip())
