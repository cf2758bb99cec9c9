"""What is compiled: the C++ and CUDA sources, their flags (``csrc/build.json``) and their fingerprint.

``setup.py``, the build on first use and CMake all read ``csrc/build.json``; nobody writes a source or a flag twice.
Only the standard library is imported here: ``setup.py`` loads this module before nanscan is installed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CppSpec", "CudaSpec", "Spec", "find_csrc", "read_spec", "source_hash"]

PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class CppSpec:
    """How the module ``nanscan._C`` is made."""

    sources: tuple[str, ...]  # relative to csrc
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]


@dataclass(frozen=True)
class CudaSpec:
    """How the shared library of the CUDA kernels is made."""

    sources: tuple[str, ...]  # relative to csrc
    flags: tuple[str, ...]
    file_name: str  # of the product


@dataclass(frozen=True)
class Spec:
    """The content of ``build.json``, and where it lies."""

    csrc: Path
    cpp: CppSpec
    cuda: CudaSpec


def find_csrc(package: Path = PACKAGE) -> Path:
    """The folder of the sources: ``nanscan/csrc`` in an installed wheel, ``csrc`` beside the package in a source tree.

    Raises:
        FileNotFoundError: neither folder has a ``build.json``; the message names both.
    """
    candidates = (package / "csrc", package.parent / "csrc")
    for folder in candidates:
        if (folder / "build.json").is_file():
            return folder
    raise FileNotFoundError(
        f"nanscan's C++ sources are missing: no build.json in {' nor in '.join(map(str, candidates))}."
    )


def read_spec(csrc: Path) -> Spec:
    """Read ``build.json`` in the folder ``csrc``."""
    data = json.loads((csrc / "build.json").read_text(encoding="utf-8"))
    cpp, cuda = data["cpp"], data["cuda"]
    return Spec(
        csrc=csrc,
        cpp=CppSpec(tuple(cpp["sources"]), tuple(cpp["flags"]), tuple(cpp.get("link_flags", ()))),
        cuda=CudaSpec(tuple(cuda["sources"]), tuple(cuda["flags"]), cuda["library"]),
    )


def source_hash(csrc: Path) -> str:
    """A fingerprint (16 hex digits) of every source, header and flag in the folder ``csrc``."""
    digest = hashlib.sha256()
    for path in sorted(csrc.iterdir()):
        if path.suffix in {".h", ".cpp", ".cuh", ".cu", ".json"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
