"""The CUDA engine compiles, spills nothing, and its library answers in words where there is no GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nanscan.engine import toolchain

ARCHS = ("75", "90")  # the oldest, which has the least room, and a common one; `make cuda` compiles for all


def load_tool() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "tools" / "check_cuda.py"
    spec = importlib.util.spec_from_file_location("check_cuda", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_cuda"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check_cuda = load_tool()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object]]:
    search = toolchain.search_cuda()
    if search.toolkit is None:
        pytest.skip(f"no CUDA toolkit, so nothing to compile with. {' '.join(search.tried)}")
    if missing := set(ARCHS) - toolchain.known_archs(search.toolkit):
        pytest.skip(f"{search.toolkit} does not compile for {sorted(missing)}")
    library = tmp_path_factory.mktemp("cuda") / "_cuda.so"
    return library, check_cuda.compile_library(search.toolkit, library, ARCHS)


def test_kernels_spill_nothing_and_need_no_stack(compiled: tuple[Path, list[object]]) -> None:
    _, uses = compiled
    assert len(uses) == len(check_cuda.KERNELS) * len(ARCHS)
    assert check_cuda.kernel_problems(uses, ARCHS) == []


def test_library_answers_cleanly_without_a_gpu(compiled: tuple[Path, list[object]]) -> None:
    library, _ = compiled
    api = check_cuda.load_api(library)
    assert api.build.decode().endswith(", compute capabilities 750,900")
    assert check_cuda.api_problems(api) == []


PTXAS = """
ptxas info    : Compiling entry function '_Z11scan_kernelLi4096EE' for 'sm_90'
ptxas info    : Function properties for _Z11scan_kernelLi4096EE
    {stack} bytes stack frame, {spill} bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 10608 bytes smem
"""


@pytest.mark.parametrize(
    ("stack", "spill", "registers", "problem"),
    [
        (0, 0, 64, None),
        (8, 0, 64, "scan_kernel, 4 KB of parameters on sm_90: 8 bytes of stack, 0 + 0 bytes of spills."),
        (0, 16, 64, "scan_kernel, 4 KB of parameters on sm_90: 0 bytes of stack, 16 + 0 bytes of spills."),
        (0, 0, 65, "scan_kernel, 4 KB of parameters on sm_90: 65 registers, more than 64."),
    ],
)
def test_check_reports_each_spill(stack: int, spill: int, registers: int, problem: str | None) -> None:
    uses = check_cuda.parse_ptxas(PTXAS.format(stack=stack, spill=spill, registers=registers))
    missing = [f"{title}: ptxas reports none for sm_90." for title in check_cuda.KERNELS if "4 KB" not in title]
    assert check_cuda.kernel_problems(uses, ["90"]) == ([problem] if problem else []) + missing


def test_check_reports_a_library_that_is_another(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="invalid ELF header|file too short"):
        (tmp_path / "_cuda.so").write_bytes(b"not a library, but longer than the header of one" * 4)
        check_cuda.load_api(tmp_path / "_cuda.so")
