"""What the CPU engine reads, under the address, undefined-behaviour and thread sanitizers; and that no bit changes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [
    "cpu_fast",
    "cpu_exact",
    "cpu_ranges",
    "measure_ranges",
    "cpu_scale",
    "cpu_copy",
    "layout",
    "parallel",
    "scan_cpu",
    "batch_check",
]


def build(sanitizers: str, folder: Path, *extra: str) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on PATH: nothing can be built with sanitizers")
    program = folder / "scan_cpu_test"
    files = [str(ROOT / "tests/cpp/scan_cpu_test.cpp"), *(str(ROOT / f"csrc/{name}.cpp") for name in SOURCES)]
    flags = ["-std=c++17", "-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-pthread", *extra]
    subprocess.run([compiler, *flags, *files, "-o", str(program), "-ldl"], check=True, timeout=900)
    return program


def run(program: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "3", "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run([str(program)], capture_output=True, text=True, timeout=300, check=False, env=env)


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_cpu_scan_is_right_on_odd_and_misaligned_memory_and_reads_nothing_outside(
    sanitizers: str, tmp_path: Path
) -> None:
    done = run(build(sanitizers, tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    *digests, verdict = done.stdout.splitlines()
    assert verdict == "all well"
    assert len({line.split()[1] for line in digests}) == 1, f"instruction sets disagree: {digests}"


def test_a_read_past_the_end_would_be_reported(tmp_path: Path) -> None:
    done = run(build("address", tmp_path, "-DNANSCAN_TEST_READ_PAST_END"))
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
