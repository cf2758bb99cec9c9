"""The bytes that one scan takes beyond the gradients, counted at malloc."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.conftest import Figures
from nanscan.bench.goals import EXTRA_BYTES
from nanscan.bench.table import print_table

HERE = Path(__file__).parent
CHUNK = 64 * 1024  # bytes of a tensor that the CPU engine reads at a time (csrc/scan_cpu.h)


@dataclass(frozen=True)
class MemoryRow:
    """Peak extra bytes of the first scan of a set of gradients and of the next one."""

    case: str
    tensors: int
    chunks: int
    first: int
    again: int

    @property
    def allowed(self) -> int:
        return EXTRA_BYTES["tensor"] * self.tensors + EXTRA_BYTES["chunk"] * self.chunks

    @property
    def verdict(self) -> str:
        over = max(self.first, self.again) - self.allowed
        return "ok" if over <= 0 else f"short by {over}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"allowed": self.allowed, "verdict": self.verdict}


def test_extra_memory_of_a_scan(figures: Figures, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        figures.note("memory was not measured: the counter needs a C compiler (cc)")
        pytest.skip("no C compiler")
    counter = tmp_path / "malloc_count.so"
    build = [compiler, "-O2", "-shared", "-fPIC", "-fno-builtin", "-o", str(counter), str(HERE / "malloc_count.c")]
    subprocess.run(build, check=True)
    environment = os.environ | {"LD_PRELOAD": str(counter), "PYTHONMALLOC": "malloc", "PYTHONPATH": str(HERE.parent)}
    probe = [sys.executable, "-m", "benchmarks.memory_probe"]
    done = subprocess.run(probe, env=environment, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=True)
    for found in json.loads(done.stdout):
        sizes = found.pop("sizes")
        row = MemoryRow(chunks=sum(-(-size // CHUNK) for size in sizes), **found)
        figures.add("memory", row, print_memory)


def print_memory(rows: Sequence[MemoryRow]) -> None:
    columns = ("gradients", "tensors", "chunks", "first scan", "next scan", "per tensor", "allowed")
    print_table(
        "Extra bytes of one scan",
        columns,
        [_cells(row) for row in rows],
        "peak of malloc (Python's objects included) while the scan runs and its result lives; "
        "allowed: 64 B per tensor + 16 B per chunk of 64 KiB",
    )


def _cells(row: MemoryRow) -> list[str]:
    per_tensor = f"{max(row.first, row.again) / row.tensors:.1f}"
    counts = (row.tensors, row.chunks, row.first, row.again)
    return [row.case, *(f"{count:,}" for count in counts), per_tensor, f"{row.allowed:,} ({row.verdict})"]
