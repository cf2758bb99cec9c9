"""Paddle's own files (``.pdparams``, ``.pdopt`` …): what `paddle.save` writes, and digests behind the pickle's end.

`paddle.load` reads up to the end of the pickle and never sees the digests. They are a line of JSON, an xxh3_128 digest
of every tensor and of what lies between; then where that line starts, and a digest of all bytes from there on.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from typing import Any

import xxhash

from nanscan.checkpoint import paddle_pickle, paddle_values, plain
from nanscan.checkpoint.digest import Region, check_regions
from nanscan.checkpoint.paddle_regions import RecordingBuffer
from nanscan.checkpoint.tensors import Found
from nanscan.checkpoint.writer import DigestingWriter
from nanscan.errors import CheckpointError, CorruptCheckpoint

__all__ = ["FORMAT"]

_NAME = b'"format":"nanscan-paddle"'
_MARK = b"\nnanscan xxh3_128 "
_END = len(_MARK) + 16 + 1 + 32  # mark, start of the digests in hex, a space, digest in hex
_ADVICE = "Use an older checkpoint or another copy of this one"


class PaddleFormat:
    """See `nanscan.checkpoint.formats.Format`."""

    holds_paddle = True

    def prepare(self, obj: Any, path: str) -> Sequence[Found]:
        _paddle(path)
        paddle_values.refuse_unfit(obj, path)
        return paddle_values.arrays_in(obj)

    def write(self, obj: Any, temporary: str) -> None:
        fd = os.open(temporary, os.O_RDWR)
        try:
            written = DigestingWriter(fd)
            buffer = RecordingBuffer(written, paddle_values.stored_in(obj))
            try:
                _paddle(temporary).save(obj, buffer)
            except Exception as error:
                raise written.failure or _refused(error) from error
            written.flush()
            os.pwrite(fd, _seal(buffer.regions, written.size), written.size)
        finally:
            os.close(fd)

    def check(self, fd: int, path: str) -> None:
        regions = _regions(fd, path)
        if regions is not None:
            check_regions(fd, path, regions)
        else:
            paddle_pickle.check_whole(fd, path)

    def read(self, path: str, fd: int, map_location: Any, verify: bool, weights_only: bool = True) -> Any:
        paddle = _paddle(path)
        if verify:
            self.check(fd, path)
        if weights_only:
            paddle_pickle.refuse_code(fd, path)
        try:
            loaded = paddle.load(path)
        except (
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            ImportError,
        ) as error:
            raise CorruptCheckpoint(
                f"{path!r} is no file of paddle.save that can be read: {error}. {_ADVICE}."
            ) from error
        return loaded if map_location is None else paddle_values.moved(loaded, map_location)


def _paddle(path: str) -> Any:
    return plain.import_optional("paddle", "paddle", path)


def _refused(error: Exception) -> CheckpointError:
    return CheckpointError(f"paddle.save refuses the state: {type(error).__name__}: {error}")


def _seal(regions: Sequence[Region], start: int) -> bytes:
    content = {"format": "nanscan-paddle", "version": 1, "hash": "xxh3_128", "regions": [list(r) for r in regions]}
    line = json.dumps(content, separators=(",", ":")).encode() + _MARK + b"%016x " % start
    return line + xxhash.xxh3_128_hexdigest(line).encode()


def _regions(fd: int, path: str) -> list[Region] | None:
    """What the file must hold; None for one that was made by something else."""
    size = os.fstat(fd).st_size
    end = os.pread(fd, _END, max(0, size - _END))
    if not end.startswith(_MARK) or len(end) != _END:
        _check_unmarked(fd, size, path)
        return None
    try:
        start = int(end[len(_MARK) : -33], 16)
    except ValueError:
        raise _damaged_end(path) from None
    tail = os.pread(fd, size - start, start) if 0 < start < size else b""
    if len(tail) <= _END or xxhash.xxh3_128_hexdigest(tail[:-32]).encode() != tail[-32:]:
        raise _damaged_end(path)
    found = json.loads(tail[:-_END])["regions"]
    return [Region(name, at, length, digest, tuple(tensors)) for name, at, length, digest, tensors in found]


def _check_unmarked(fd: int, size: int, path: str) -> None:
    """A damaged or prolonged file of ours is told from one that never had digests by what else we put into it."""
    length = min(size, 1 << 20)
    tail = os.pread(fd, length, size - length)
    at = tail.rfind(_MARK)
    if 0 <= at < length - _END:
        raise CorruptCheckpoint(f"{path!r} has {length - at - _END:,} bytes after its end. {_ADVICE}.")
    if _NAME in tail:
        raise _damaged_end(path)


def _damaged_end(path: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{path!r} is corrupt: its end (the list of digests) is not what was saved, or is cut off. {_ADVICE}."
    )


FORMAT = PaddleFormat()
