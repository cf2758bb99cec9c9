"""Digests of a saved archive: one for each member, one for the bytes between them, and one for these digests.

A file made by `nanscan.save` ends in one more member, ``…/.nanscan/digests``, with an xxh3_128 digest of every other
member (a tensor's bytes are one member) and of everything between them. The comment of the archive holds where that
member starts and a digest of all bytes from there on. So no bit of the file is without one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import NamedTuple

import xxhash

from nanscan.checkpoint import layout
from nanscan.checkpoint.turns import give_way
from nanscan.checkpoint.writer import CHUNK, PART, DigestingWriter
from nanscan.errors import CorruptCheckpoint

__all__ = [
    "Region",
    "Seal",
    "Written",
    "add_digests",
    "check_regions",
    "check_rest",
    "check_seal",
    "check_written",
    "corrupt_regions",
    "read_seal",
]

MEMBER = ".nanscan/digests"
FORMAT = "nanscan-digests"
_MARK = b"nanscan xxh3_128 "
_COMMENT = len(_MARK) + 16 + 1 + 32  # mark, start of the digests in hex, a space, digest in hex
_HEADERS = 1024  # bytes between two neighbouring members at most, roughly
_PARALLEL = 8 << 20  # bytes from which waking other threads pays
_ADVICE = "Use an older checkpoint or another copy of this one"


class Region(NamedTuple):
    """A run of bytes with a digest; ``tensors`` are the paths of the tensors that it holds."""

    name: str
    start: int
    size: int
    digest: str
    tensors: tuple[str, ...] = ()

    @property
    def is_storage(self) -> bool:
        """True for the memory of a tensor."""
        return "/data/" in self.name

    def describe(self) -> str:
        """What it is called in a message."""
        if not self.tensors:
            return f"member {self.name!r}"
        more = len(self.tensors) - 1
        return f"tensor {self.tensors[0]}" + (f" (and {more} more that share its memory)" if more else "")


_place = attrgetter("start", "size")  # an empty one before the one that begins at the same byte
_digest_of = xxhash.xxh3_128_hexdigest


class Seal(NamedTuple):
    """The digests of a file: its regions in order, the digest of what lies between, and where the digests start."""

    regions: tuple[Region, ...]
    rest: str
    end: int


class Written(NamedTuple):
    """What a file holds: the digests, and all bytes from them on."""

    seal: Seal
    tail: bytes


def add_digests(fd: int, written: DigestingWriter, tensors: Mapping[str, Sequence[str]]) -> Written:
    """Append the digests to the archive that was written through ``written``.

    Args:
        fd: of the archive, for reading and writing.
        written: knows the digests of what it wrote.
        tensors: key of a storage ("0", "1", …) -> paths of the tensors in it.

    Returns:
        What the file must hold now.
    """
    directory = layout.read_directory(fd, written.size)
    members = layout.members_of(directory)
    regions = tuple(sorted(_regions(fd, members, written, tensors), key=_place))
    seal = Seal(regions, _rest_digest(fd, regions, directory.start), directory.start)
    name = members[0].name.split("/")[0]
    comment = _MARK + b"%016x " % directory.start + b"0" * 32
    tail = layout.tail_with(directory, f"{name}/{MEMBER}", _dumps(seal), comment)[:-32]
    tail += xxhash.xxh3_128_hexdigest(tail).encode()
    _write_at(fd, tail, directory.start)
    os.ftruncate(fd, directory.start + len(tail))
    return Written(seal, tail)


def _regions(
    fd: int, members: Sequence[layout.Member], written: DigestingWriter, tensors: Mapping[str, Sequence[str]]
) -> Iterator[Region]:
    """Each member as one region, a long one as several."""
    for name, header, length, _ in members:
        start = layout.data_start(written.tiny(header) or os.pread(fd, 30, header), header)
        folder, _, key = name.partition("/")[2].rpartition("/")
        paths = tuple(tensors.get(key, ())) if folder == "data" else ()
        for at in range(start, start + length, PART) if length > PART else (start,):
            size = min(PART, start + length - at)
            digest = written.digest(at, size) or digest_range(fd, at, size)
            yield Region(name, at, size, digest.hex(), paths)


def _dumps(seal: Seal) -> bytes:
    content = {
        "format": FORMAT, "version": 1, "hash": "xxh3_128", "end": seal.end, "rest": seal.rest,
        "regions": seal.regions,
    }  # fmt: skip
    return json.dumps(content, separators=(",", ":")).encode()


def _loads(content: bytes) -> Seal:
    found = json.loads(content)
    regions = (Region(name, start, size, digest, tuple(paths)) for name, start, size, digest, paths in found["regions"])
    return Seal(tuple(regions), found["rest"], found["end"])


def _write_at(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while len(view):
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


def read_seal(fd: int, path: str) -> Seal | None:
    """The digests in the file, themselves checked; None for a file that was made by something else.

    Raises:
        CorruptCheckpoint: there were digests, and they or the end of the file are damaged.
    """
    size = os.fstat(fd).st_size
    comment = os.pread(fd, _COMMENT, max(0, size - _COMMENT))
    if not (comment.startswith(_MARK) and len(comment) == _COMMENT):
        _check_unmarked(fd, size, path)
        return None
    try:
        start = int(comment[len(_MARK) : -33], 16)
    except ValueError:
        raise _damaged_end(path) from None
    if not 0 < start < size:
        raise _damaged_end(path)
    tail = os.pread(fd, size - start, start)
    if xxhash.xxh3_128_hexdigest(tail[:-32]).encode() != tail[-32:]:
        raise _damaged_end(path)
    content = layout.data_start(tail[:30], start) - start
    return _loads(tail[content : content + layout.local_size(tail)])


def _check_unmarked(fd: int, size: int, path: str) -> None:
    """A damaged or prolonged file of ours is told from one that never had digests by what else we put into it."""
    length = min(size, 1 << 20)
    tail = os.pread(fd, length, size - length)
    at = tail.rfind(_MARK)
    if 0 <= at < length - _COMMENT:
        raise CorruptCheckpoint(f"{path!r} has {length - at - _COMMENT:,} bytes after its end. {_ADVICE}.")
    if MEMBER.encode() in tail:
        raise _damaged_end(path)


def _damaged_end(path: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{path!r} is corrupt: its end (the list of digests, the zip directory or the end record and comment) is not "
        f"what was saved, or is cut off. {_ADVICE}."
    )


def check_written(fd: int, path: str, written: Written) -> None:
    """Compare every byte of a file with what was to be written; raises `CorruptCheckpoint`."""
    end = written.seal.end
    if os.pread(fd, len(written.tail) + 1, end) != written.tail:
        raise _damaged_end(path)
    check_seal(fd, path, written.seal)


def check_seal(fd: int, path: str, seal: Seal) -> None:
    """Compare every byte with the digests.

    Raises:
        CorruptCheckpoint: naming the tensors, or the part of the archive.
    """
    check_rest(fd, path, seal)
    check_regions(fd, path, seal.regions)


def check_rest(fd: int, path: str, seal: Seal) -> None:
    """Compare what lies between the members, the zip headers and padding, with its digest."""
    if _rest_digest(fd, seal.regions, seal.end) != seal.rest:
        raise CorruptCheckpoint(
            f"{path!r} is corrupt: zip headers or padding before byte {seal.end:,} are not what was saved. {_ADVICE}."
        )


def check_regions(fd: int, path: str, regions: Iterable[Region]) -> None:
    """Compare these members with their digests, in several threads."""
    shares = _shares(list(regions))
    bad = [region for found in _in_threads(fd, shares) for region in found]
    if bad:
        raise corrupt_regions(path, bad)


def _in_threads(fd: int, shares: list[list[Region]]) -> list[list[Region]]:
    if len(shares) > 1:
        try:
            with ThreadPoolExecutor(len(shares)) as pool:
                return list(pool.map(lambda share: _bad_regions(fd, share), shares))
        except RuntimeError:  # the interpreter is ending (a save at exit) and starts no threads any more
            pass
    return [_bad_regions(fd, share) for share in shares]


def corrupt_regions(path: str, bad: Sequence[Region]) -> CorruptCheckpoint:
    """The error that names the damaged members."""
    names = list(dict.fromkeys(region.describe() for region in bad))
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return CorruptCheckpoint(
        f"{path!r} is corrupt: the bytes of {listed} are not those that were saved (their xxh3_128 digest differs). "
        f"{_ADVICE}."
    )


def _shares(regions: Sequence[Region]) -> list[list[Region]]:
    """Regions for each thread, about as many bytes for each, neighbours together."""
    total = sum(region.size for region in regions)
    threads = min(4, os.cpu_count() or 1) if total >= _PARALLEL else 1
    shares: list[list[Region]] = [[] for _ in range(threads)]
    before = 0
    for region in sorted(regions, key=_place):
        middle = before + region.size // 2
        shares[min(threads - 1, middle * threads // max(1, total))].append(region)
        before += region.size
    return shares


def _bad_regions(fd: int, regions: Sequence[Region]) -> list[Region]:
    chunk = memoryview(bytearray(CHUNK))  # once: new memory costs as much as hashing it
    return [region for some in _runs(regions) for region in _bad_in_run(fd, some, chunk)]


def _runs(regions: Sequence[Region]) -> Iterator[list[Region]]:
    """Neighbours that one read brings, as a state's thousands of small tensors; a larger region by itself."""
    run: list[Region] = []
    end = 0
    for region in regions:
        if run and (region.start + region.size - run[0].start > CHUNK or region.start - end > _HEADERS):
            yield run
            run = []
        run.append(region)
        end = region.start + region.size
    if run:
        yield run


def _bad_in_run(fd: int, run: Sequence[Region], chunk: memoryview) -> list[Region]:
    give_way()
    first = run[0].start
    if len(run) == 1:
        return [] if digest_range(fd, first, run[0].size, chunk).hex() == run[0].digest else [run[0]]
    found = chunk[: os.preadv(fd, [chunk[: run[-1].start + run[-1].size - first]], first)]
    return [
        region
        for region in run
        if _digest_of(found[region.start - first : region.start - first + region.size]) != region.digest
    ]


def digest_range(fd: int, start: int, size: int, chunk: memoryview | None = None) -> bytes:
    """The digest of ``size`` bytes from ``start`` on; of fewer where the file ends before. ``chunk``: to read into."""
    chunk = memoryview(bytearray(CHUNK)) if chunk is None else chunk
    if size <= len(chunk):
        give_way()
        return xxhash.xxh3_128_digest(chunk[: os.preadv(fd, [chunk[:size]], start)])
    digest = xxhash.xxh3_128()
    for at in range(start, start + size, len(chunk)):
        got = os.preadv(fd, [chunk[: min(len(chunk), start + size - at)]], at)
        digest.update(chunk[:got])
    return digest.digest()


def _rest_digest(fd: int, regions: Sequence[Region], end: int) -> str:
    digest = xxhash.xxh3_128()
    for start, stop in _gaps(regions, end):
        give_way()
        digest.update(os.pread(fd, stop - start, start))
    return digest.hexdigest()


def _gaps(regions: Sequence[Region], end: int) -> Iterator[tuple[int, int]]:
    at = 0
    for region in regions:
        if region.start > at:
            yield at, region.start
        at = max(at, region.start + region.size)
    if end > at:
        yield at, end
