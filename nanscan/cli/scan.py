"""`nanscan scan FILE…`: which tensors of checkpoint files hold a NaN or Inf; a row each, a summary per file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanscan.cli.output import common_options, name_limit, plural, print_json, print_lines, printable
from nanscan.cli.progress import working
from nanscan.cli.scan_bar import ScanBar
from nanscan.cli.verb import FileName, Verb
from nanscan.tables import print_table, show_bytes

if TYPE_CHECKING:
    from nanscan.files.model import FileScan, TensorRow

COLUMNS = ("name", "shape", "dtype", "nan_count", "inf_count", "first_bad", "finite_norm", "inf_norm")
TEXTS = (0, 1, 2, 5)  # the columns that hold no figures


@click.command(
    "scan",
    cls=Verb,
    short_help="Scan checkpoint files for NaN and Inf.",
    examples={
        "nanscan scan last.pt": "the bad tensors of a file",
        "nanscan scan --all checkpoints/": "each tensor of a folder",
        "nanscan scan *.safetensors --json | jq .finite": "for a script",
    },
    exits="0 all finite; 1 a NaN or Inf, or a damaged file; 2 (wins) a file that isn't there or can't be read.",
)
@click.argument("files", nargs=-1, required=True, type=FileName(path_type=Path), metavar="FILE...")
@click.option("--all", "show_all", is_flag=True, help="Print a row for every tensor, not only for bad ones.")
@click.option("--nan-only", is_flag=True, help="Allow Inf (masks hold -inf on purpose).")
@common_options
def command(files: tuple[Path, ...], show_all: bool, nan_only: bool, as_json: bool) -> int:
    """Scan .pt .pth .bin .ckpt .pkl, .safetensors, .h5 .hdf5, .npz and .npy files.

    A folder is searched for them; an index of shards (*.index.json) stands for its shards. No code in a file is run.
    finite_norm and inf_norm are the 2-norm and the largest magnitude of the finite elements.
    """
    with working("importing PyTorch"):
        from nanscan.files.model import scan_all

    results: list[FileScan] = []
    with ScanBar(files).shown() as bar:
        for result in scan_all(files, bar.update):
            results.append(result)
            with bar.finished(result.size):
                if not as_json:
                    _print(result, show_all=show_all, nan_only=nan_only)
                elif result.misuse:
                    _complain(result, nan_only)
    code = max((_code(result, nan_only) for result in results), default=0)
    if as_json:
        print_json(_document(results, show_all=show_all, nan_only=nan_only, code=code))
    return code


def _code(result: FileScan, nan_only: bool) -> int:
    if result.error is not None:
        return 2 if result.misuse else 1
    return 1 if result.bad(nan_only=nan_only) else 0


def _print(result: FileScan, *, show_all: bool, nan_only: bool) -> None:
    if result.misuse:
        _complain(result, nan_only)
        return
    print_lines([_summary(result, nan_only)])
    rows = result.rows if show_all else result.bad(nan_only=nan_only)
    if rows:
        print_table(COLUMNS, [_cells(row) for row in rows], sys.stdout, text_columns=TEXTS, style=_style)
    print_lines(f"  note: {note}" for note in result.notes)


def _complain(result: FileScan, nan_only: bool) -> None:
    click.echo(f"nanscan: {_summary(result, nan_only)}", err=True)


def _style(row: Sequence[str]) -> str:
    return "red" if row[5] != "-" else ""


def _summary(result: FileScan, nan_only: bool) -> str:
    path = printable(str(result.path))
    if result.error is not None:
        error = printable(result.error, limit=2000)
        found = f"; in what could be read: {_found(result, nan_only)}" if result.bad(nan_only=nan_only) else ""
        return f"{path}: {'cannot be scanned' if result.misuse else 'damaged'}: {error}{found}"
    counts = f"{plural(result.tensors, 'tensor')}, {plural(result.elements, 'element')}, {show_bytes(result.size)}"
    skipped = f", {result.skipped} skipped (no floating-point numbers)" if result.skipped else ""
    return f"{path}: {_found(result, nan_only)} ({result.format}, {counts}{skipped})"


def _found(result: FileScan, nan_only: bool) -> str:
    bad = result.bad(nan_only=nan_only)
    if not bad:
        return "no NaN" if nan_only else "all finite" if result.tensors else "nothing to scan"
    nan, inf = sum(row.nan_count for row in bad), sum(row.inf_count for row in bad)
    return f"{nan:,} NaN, {inf:,} Inf in {plural(len(bad), 'tensor')}"


def _cells(row: TensorRow) -> tuple[str, ...]:
    first = "-" if row.first_bad is None else str(list(row.first_bad))
    norms = f"{row.finite_norm:.6g}", f"{row.inf_norm:.6g}"
    counts = f"{row.nan_count:,}", f"{row.inf_count:,}"
    return printable(row.name, name_limit()) or '""', str(list(row.shape)), row.dtype, *counts, first, *norms


def _document(results: Sequence[FileScan], *, show_all: bool, nan_only: bool, code: int) -> dict[str, Any]:
    return {
        "finite": all(result.error is None and not result.bad() for result in results),
        "exit_code": code,
        "error": "; ".join(f"{result.path}: {result.error}" for result in results if result.misuse) or None,
        "files": [_file(result, show_all=show_all, nan_only=nan_only) for result in results],
    }


def _file(result: FileScan, *, show_all: bool, nan_only: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "path": str(result.path),
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
