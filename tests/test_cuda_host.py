"""The CUDA kernels, compiled as ordinary C++ and run on the host against float64 (tests/cpp), under the sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("-std=c++20", "-O1", "-g", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror", "-pthread")
SANITIZERS = {"address": "address,undefined", "thread": "thread"}
DTYPES = re.findall(r"^  X\((\w+),", (ROOT / "csrc" / "dtype.h").read_text(encoding="utf-8"), re.MULTILINE)
ADDRESS_TESTS = [
    *(f"values_{dtype}" for dtype in DTYPES),
    "every_pattern",
    "long_tensors",
    "several_launches",
    "small_and_large_parameters",
    "many_large_parameters",
    "same_bits",
    "workspace_reuse",
    "empty_lists",
    "extra_tensors",
    "clipping",
    "incoming_flag",
    "clear_where_flagged",
    "huge_sizes",
    "faults",
]
KERNEL = (ROOT / "csrc" / "scan_cuda_kernel.cuh").read_text(encoding="utf-8")
SYNCS = [f"{name}-{i}" for i, name in enumerate(re.findall(r"(__syncthreads|__threadfence)\(\);", KERNEL))]
THREAD_TESTS = ["few_values", "long_tensors", "several_launches", "workspace_reuse", "clear_where_flagged"]


@dataclass(frozen=True)
class Programs:
    """The runner, once for each sanitizer, or why there is none."""

    paths: dict[str, Path]
    problem: str = ""

    def run(self, sanitizer: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        if self.problem:
            pytest.skip(self.problem)
        env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
        command = [str(self.paths[sanitizer]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


def compile_runner(compiler: str, sanitizer: str, output: Path) -> subprocess.CompletedProcess[str]:
    source = ROOT / "tests" / "cpp" / "scan_cuda_host.cpp"
    extra = [f"-fsanitize={SANITIZERS[sanitizer]}", "-fno-sanitize-recover=all", "-DNANSCAN_CUDA_WARPS=2"]
    command = [compiler, *FLAGS, *extra, f"-I{ROOT / 'csrc'}", str(source), "-o", str(output)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def missing_compiler(folder: Path) -> str:
    """Why nothing can be built here; empty if it can. A failure of our own source is no reason."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "no g++ on PATH: the kernels are not run on the host"
    probe = folder / "probe.cpp"
    probe.write_text("#include <atomic>\nint x; int main() { return std::atomic_ref<int>(x).load(); }\n")
    for sanitizer in SANITIZERS.values():
        command = [compiler, "-std=c++20", f"-fsanitize={sanitizer}", str(probe), "-o", str(folder / "probe")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"g++ can not build C++20 with -fsanitize={sanitizer}: {done.stderr.strip()[:200]}"
    return ""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    folder = tmp_path_factory.mktemp("cuda-host")
    if problem := missing_compiler(folder):
        return Programs({}, problem)
    paths = {sanitizer: folder / f"host_{sanitizer}" for sanitizer in SANITIZERS}
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda item: compile_runner("g++", *item), paths.items()))
    for done in results:
        assert done.returncode == 0, done.stderr
    return Programs(paths)


def assert_ok(done: subprocess.CompletedProcess[str], test: str) -> None:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert re.search(rf"^ok {test}: [1-9]\d* checks, 0 failures$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("test", ADDRESS_TESTS)
def test_kernel_agrees_with_float64_and_reads_only_its_tensors(programs: Programs, test: str) -> None:
    assert_ok(programs.run("address", test), test)


@pytest.mark.parametrize("test", THREAD_TESTS)
def test_kernel_has_no_data_race(programs: Programs, test: str) -> None:
    done = programs.run("thread", test)
    assert "ThreadSanitizer" not in done.stderr, done.stderr[:4000]
    assert_ok(done, test)


@pytest.mark.parametrize("number", range(len(SYNCS)), ids=SYNCS)
def test_thread_sanitizer_reports_each_removed_barrier_and_fence(programs: Programs, number: int) -> None:
    for _ in range(4):  # a race shows itself by chance: what it breaks may end the program before the report
        done = programs.run("thread", "--without", str(number), "long_tensors")
        assert done.returncode != 0
        if "WARNING: ThreadSanitizer: data race" in done.stderr:
            return
    pytest.fail(f"no report in four runs: {done.stdout}{done.stderr[:2000]}")


def test_a_wrong_answer_fails_the_runner(programs: Programs) -> None:
    """Without its barrier a block folds what is not there yet: the comparison with float64 has to notice."""
    done = programs.run("address", "--without", "0", "long_tensors")
    assert SYNCS[0] == "__syncthreads-0"
    assert done.returncode != 0
    assert "FAILED" in done.stdout or "runtime error: signed integer overflow" in done.stderr  # garbage, added up


def test_the_runner_has_no_other_tests(programs: Programs) -> None:
    listed = programs.run("address").stdout.split()
    assert sorted(listed) == sorted({*ADDRESS_TESTS, *THREAD_TESTS})
