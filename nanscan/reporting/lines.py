"""The lines of a log file: plain or gzip'ed, of any length, as far as they can be read."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

__all__ = ["MAX_LINE", "read_lines"]

MAX_LINE = 64 << 20  # bytes; a step with 100,000 bad tensors has about 30 MB
GZIP = b"\x1f\x8b"


def read_lines(path: Path, complain: Callable[[str], None]) -> Iterator[bytes]:
    """Each line with its newline; of one that is longer than 64 MiB only the front.

    Args:
        path: of the log, or of a log that was compressed with gzip.
        complain: is told in a sentence what can't be read.

    Raises:
        OSError: it can't be opened or read.
    """
    with path.open("rb") as raw:
        if raw.peek(2)[:2] != GZIP:
            yield from _pieces(raw, complain)
            return
        try:
            with gzip.open(raw) as unpacked:
                yield from _pieces(cast(IO[bytes], unpacked), complain)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            complain(f"The compressed file can't be read to its end ({error}): it is cut off or damaged.")


def _pieces(file: IO[bytes], complain: Callable[[str], None]) -> Iterator[bytes]:
    too_long = 0
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            too_long += 1
            while (rest := file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                pass
            line = line[:1000] + b"\n"
        yield line
    if too_long:
        which = "1 line is" if too_long == 1 else f"{too_long:,} lines are"
        complain(f"{which} longer than {MAX_LINE >> 20} MiB, no step, and ignored.")
