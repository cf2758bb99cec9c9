"""What a file or folder is that holds no checkpoint of ours or torch.save's: by first bytes, members or names."""

from __future__ import annotations

import os
from collections.abc import Iterable

__all__ = ["kind_by_head", "kind_by_members", "kind_of_folder"]

_HEADS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: run git lfs pull",
    b"<!DOCTYPE": "a web page, not a checkpoint: the download went wrong",
    b"<html": "a web page, not a checkpoint: the download went wrong",
    b"<?xml": "XML, not a checkpoint: an answer of a server in place of the download?",
    b"\x1f\x8b": "compressed with gzip: unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it first",
    b"BZh": "compressed with bzip2: unpack it first",
    b"\xfd7zXZ": "compressed with xz: unpack it first",
    b"7z\xbc\xaf": "a 7z archive: unpack it first",
    b"Rar!": "a RAR archive: unpack it first",
    b"GGUF": "a GGUF file, for which there is no reader",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"%PDF": "a PDF file",
    b"\x7fELF": "a program or shared library",
}
_ONNX_SECOND = (0x12, 0x3A, 0x42)  # the producer's name, the graph or the operator sets follow the version
_MEMBERS = (
    (("models/", "serialized_exported_program.json"), "an exported program: load it with torch.export.load"),
    (("model.weights.h5",), "a Keras model: take its model.weights.h5 out of the archive"),
    (("word/", "xl/", "ppt/"), "an Office document"),
)


def kind_by_head(head: bytes) -> str | None:
    """What a file is that begins with `head` (at least 32 bytes, if it has so many), with what to do; None: unknown.

    >>> kind_by_head(b"GGUF...."), kind_by_head(b"PK..")
    ('a GGUF file, for which there is no reader', None)
    """
    for magic, what in _HEADS.items():
        if head.startswith(magic):
            return what
    if len(head) > 2 and head[0] == 0x08 and 0 < head[1] < 32 and head[2] in _ONNX_SECOND:
        return "an ONNX model, which is no checkpoint of PyTorch: open it with onnx or onnxruntime"
    return None


def kind_by_members(names: Iterable[str]) -> str | None:
    """What a zip archive with members of these names is, with what to do; None: unknown.

    >>> kind_by_members(["net/models/model.json", "net/archive_format"])
    'an exported program: load it with torch.export.load'
    """
    listed = list(names)
    inner = [*listed, *(name.partition("/")[2] for name in listed)]
    for starts, what in _MEMBERS:
        if any(name.startswith(starts) for name in inner):
            return what
    if listed and all(name.endswith(".npy") for name in listed):
        return "a NumPy archive: load it with numpy.load"
    return None


def kind_of_folder(path: str | os.PathLike[str]) -> str | None:
    """What a folder is that was given in place of a file, with what to do; None: unknown, or not readable."""
    try:
        sharded = any(name.endswith(".distcp") for name in os.listdir(path))
    except OSError:
        return None
    if not sharded:
        return None
    return (
        "a sharded checkpoint (.distcp files), which is not read directly: make one file of it with "
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt"
    )
