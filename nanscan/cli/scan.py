"""`nanscan scan FILE…`: which tensors of checkpoint files hold a NaN or Inf; a row each, a summary per file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from nanscan.cli.output import common_options, print_json, results_console, status_console
from nanscan.files.model import FileScan, TensorRow, scan_all

BAR_FROM = 64 << 20  # bytes; below that a bar would only flicker
COLUMNS = ("name", "shape", "dtype", "nan_count", "inf_count", "first_bad", "finite_norm", "inf_norm")
MAX_NAME = 300

EPILOG = """\b
Exit code: 0 every tensor is finite; 1 a NaN or Inf was found, or a file is
damaged or incomplete; 2 misuse: a file isn't there, or nothing can read it.
2 wins over 1; what can be scanned is scanned all the same."""


@click.command("scan", short_help="Scan checkpoint files for NaN and Inf.", epilog=EPILOG)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--all", "show_all", is_flag=True, help="Print a row for every tensor, not only for bad ones.")
@click.option("--nan-only", is_flag=True, help="Allow Inf (masks hold -inf on purpose).")
@common_options
def command(files: tuple[Path, ...], show_all: bool, nan_only: bool, as_json: bool) -> int:
    """Scan checkpoints: .pt .pth .bin .ckpt .pkl, .safetensors, .h5 .hdf5, .npz .npy; content decides, not the suffix.

    A folder is searched for such files; the index of a model in shards (*.index.json) stands for its shards. No code in
    a file is run, and no more than a few megabytes of it are held in memory. Python numbers are not looked at; integer
    tensors are counted as skipped.

    finite_norm and inf_norm are the 2-norm and the largest magnitude of the finite elements.
    """
    results: list[FileScan] = []
    with _Bar(hidden=as_json) as bar:
        for result in scan_all(files, bar.update):
            results.append(result)
            if not as_json:
                bar.hide()
                _print(result, show_all=show_all, nan_only=nan_only)
            elif result.misuse:
                click.echo(f"nanscan: {_summary(result, nan_only)}", err=True)
    code = max((_code(result, nan_only) for result in results), default=0)
    if as_json:
        print_json(_document(results, show_all=show_all, nan_only=nan_only, code=code))
    return code


def _code(result: FileScan, nan_only: bool) -> int:
    if result.error is not None:
        return 2 if result.misuse else 1
    return 1 if result.bad(nan_only=nan_only) else 0


class _Bar:
    """A progress bar on stderr, for large files on a terminal only."""

    def __init__(self, hidden: bool) -> None:
        console = status_console()
        columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal)
        self._task = self._bar.add_task("", total=None, visible=False)
        self._path: Path | None = None

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, path: Path, done: int, total: int) -> None:
        """Show how far the scan of a file is."""
        if total < BAR_FROM:
            return
        self._bar.update(
            self._task, description=printable(path.name), completed=done, total=total, visible=done < total
        )

    def hide(self) -> None:
        """Take the bar away before results are printed."""
        self._bar.update(self._task, visible=False)
        self._bar.refresh()


def _print(result: FileScan, *, show_all: bool, nan_only: bool) -> None:
    if result.misuse:
        click.echo(f"nanscan: {_summary(result, nan_only)}", err=True)
        return
    console = results_console()
    rows = result.rows if show_all else result.bad(nan_only=nan_only)
    for line in [_summary(result, nan_only), *_table(rows), *(f"  note: {note}" for note in result.notes)]:
        console.print(printable(line, limit=None), markup=False, soft_wrap=True)


def _summary(result: FileScan, nan_only: bool) -> str:
    path = _path(result)
    if result.error is not None:
        error = printable(result.error, limit=2000)
        found = f"; in what could be read: {_found(result, nan_only)}" if result.bad(nan_only=nan_only) else ""
        return f"{path}: {'cannot be scanned' if result.misuse else 'damaged'}: {error}{found}"
    counts = f"{_plural(result.tensors, 'tensor')}, {_plural(result.elements, 'element')}, {_size(result.size)}"
    skipped = f", {result.skipped} skipped (no floating-point numbers)" if result.skipped else ""
    return f"{path}: {_found(result, nan_only)} ({result.format}, {counts}{skipped})"


def _path(result: FileScan) -> str:
    return printable(str(result.path), limit=None)


def _found(result: FileScan, nan_only: bool) -> str:
    bad = result.bad(nan_only=nan_only)
    if not bad:
        return "no NaN" if nan_only else "all finite" if result.tensors else "nothing to scan"
    nan, inf = sum(row.nan_count for row in bad), sum(row.inf_count for row in bad)
    return f"{nan:,} NaN, {inf:,} Inf in {_plural(len(bad), 'tensor')}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _size(size: int) -> str:
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if size >= 1000**power:
            return f"{size / 1000**power:.1f} {unit}"
    return f"{size} B"


def _table(rows: Sequence[TensorRow]) -> Iterator[str]:
    """Aligned columns; plain text, so that a name is never cut and a pipe can search for it."""
    if not rows:
        return
    cells = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [min(60, max(len(line[i]) for line in cells)) for i in range(len(COLUMNS))]
    for line in cells:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _cells(row: TensorRow) -> tuple[str, ...]:
    first = "-" if row.first_bad is None else str(list(row.first_bad))
    norms = f"{row.finite_norm:.6g}", f"{row.inf_norm:.6g}"
    counts = f"{row.nan_count:,}", f"{row.inf_count:,}"
    return printable(row.name) or '""', str(list(row.shape)), row.dtype, *counts, first, *norms


def printable(text: str, limit: int | None = MAX_NAME) -> str:
    """`text` without control characters: a name in a foreign file must not steer the terminal.

    >>> printable("w\\x1b[2J")
    'w\\\\x1b[2J'
    """
    if limit is not None and len(text) > limit:
        text = f"{text[: limit - 20]}…{text[-19:]}"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _document(results: Sequence[FileScan], *, show_all: bool, nan_only: bool, code: int) -> dict[str, Any]:
    return {
        "finite": all(result.error is None and not result.bad() for result in results),
        "exit_code": code,
        "error": "; ".join(f"{_path(result)}: {result.error}" for result in results if result.misuse) or None,
        "files": [_file(result, show_all=show_all, nan_only=nan_only) for result in results],
    }


def _file(result: FileScan, *, show_all: bool, nan_only: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "path": _path(result),
        "format": result.format or None,
        "size": result.size,
        "tensors": result.tensors,
        "elements": result.elements,
        "skipped": result.skipped,
        "finite": result.error is None and not result.bad(),
        "nan_count": sum(row.nan_count for row in result.rows),
        "inf_count": sum(row.inf_count for row in result.rows),
        "bad": [row.to_dict() for row in result.bad(nan_only=nan_only)],
        "notes": result.notes,
        "error": result.error,
    }
    return {**document, "rows": [row.to_dict() for row in result.rows]} if show_all else document
