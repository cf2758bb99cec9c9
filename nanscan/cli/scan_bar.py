"""How far a scan of files is: one bar over all bytes, on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nanscan.cli.progress import bars, is_shown, running, short

__all__ = ["ScanBar"]

BAR_FROM = 64 << 20  # bytes; below that a bar would only flicker
BESIDE = 45  # columns of the terminal that the bar and its figures take


class ScanBar:
    """A bar on stderr, out of the way while results are printed.

    Args:
        paths: what is going to be scanned; its size is looked up only if there is somebody to show it to.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

        text = TextColumn("{task.description}", markup=False)
        self._bars = bars(text, BarColumn(20), DownloadColumn(), TimeRemainingColumn(compact=True))
        self._before = 0  # bytes of the files that are done
        self._total = total_size(paths) if is_shown() else 0
        self._bars.disable |= self._total < BAR_FROM
        self._task = self._bars.add_task("", total=self._total)

    @contextlib.contextmanager
    def shown(self) -> Iterator[ScanBar]:
        """Draw it while the block runs."""
        with running(self._bars):
            yield self

    def update(self, path: Path, done: int, total: int) -> None:
        """Note how far one file is; it may hold fewer numbers than bytes."""
        if not self._bars.disable:
            at = self._before + done
            self._bars.update(
                self._task, description=short(path.name, BESIDE), completed=at, total=max(self._total, at)
            )

    @contextlib.contextmanager
    def finished(self, size: int) -> Iterator[None]:
        """A file is done, and its results are printed in this block."""
        self._before += size
        if self._bars.disable or not sys.stdout.isatty():
            yield
            return
        self._bars.stop()
        yield
        sys.stdout.flush()
        self._bars.start()


def total_size(paths: Sequence[Path]) -> int:
    """Bytes of all files that are named, in a named folder, or in an index; what can't be read counts 0."""
    from nanscan.errors import CheckpointError
    from nanscan.files.folders import INDEX_SUFFIX, Index, expand

    sizes: dict[Path, int] = {}
    for path in paths:
        with contextlib.suppress(OSError, CheckpointError):
            for file in expand([path]):
                shards = Index.read(file).shards if file.name.endswith(INDEX_SUFFIX) else ()
                for one in (file, *shards):
                    with contextlib.suppress(OSError):
                        sizes[one] = one.stat().st_size
    return sum(sizes.values())
