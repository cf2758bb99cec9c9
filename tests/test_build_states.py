"""The three states of an installation, each lived through: prebuilt, built on first use, no compiler."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest

from tests.build_support import (
    Ran,
    Tree,
    copy_tree,
    environment_with,
    fake_compiler,
    finish,
    linked_torch_libraries,
    only,
    wheel_of,
)

SCAN = """
import json, math, torch, nanscan
report = nanscan.scan([torch.tensor([3.0, math.nan, 4.0]), torch.tensor([math.inf])])
info = nanscan.engine_info().to_dict()
print(json.dumps(info | {"nan": report.nan_count, "inf": report.inf_count, "finite_norm": report.finite_norm}))
"""
LOAD = "from nanscan.engine import build; print(getattr(build.load_native(), '__file__', None))"
NOT_AVAILABLE = "the compiled engine is not available"


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """The real sources, nothing compiled."""
    return copy_tree(tmp_path_factory.mktemp("source") / "tree")


@pytest.fixture
def tiny_tree(tmp_path: Path) -> Tree:
    return copy_tree(tmp_path / "tree", tiny=True)


@pytest.fixture
def no_compiler(tmp_path: Path) -> str:
    """A PATH on which nothing compiles."""
    (tmp_path / "bin").mkdir()
    return str(tmp_path / "bin")


def answer(ran: Ran) -> dict[str, object]:
    """What `SCAN` printed, after the check that the scan itself was right."""
    assert ran.code == 0, ran.err
    info: dict[str, object] = json.loads(ran.out)
    assert (info["nan"], info["inf"], info["finite_norm"]) == (1, 1, 5.0)
    return info


def warnings_in(text: str) -> int:
    return text.count(NOT_AVAILABLE)


def test_the_wheel_is_built_in_isolation_and_runs_prebuilt_in_a_fresh_environment(
    source_tree: Tree, tmp_path: Path
) -> None:
    built = wheel_of(source_tree, tmp_path / "wheels", NANSCAN_CUDA="0")
    assert built.code == 0, built.out + built.err
    python = environment_with(only(tmp_path / "wheels", "nanscan-*.whl"), tmp_path / "venv")
    site = only(tmp_path / "venv", "lib/python*/site-packages")

    cache = tmp_path / "cache"
    ran = Tree(tmp_path / "nothing", cache).run(SCAN, python)
    info = answer(ran)
    assert (info["engine"], info["native"]) == ("native", "prebuilt")
    assert str(info["native_path"]).startswith(f"{site}/nanscan/_C.")
    assert "building" not in ran.err
    assert not cache.exists()

    module = Path(str(info["native_path"]))
    assert linked_torch_libraries(module) == []
    for source in sorted((source_tree.root / "csrc").iterdir()):
        assert (site / "nanscan" / "csrc" / source.name).read_bytes() == source.read_bytes()
    record = json.loads((site / "nanscan" / "_build.json").read_text())
    assert record["cpp"] == "built"
    assert record["cuda"].startswith("Not built while installing, NANSCAN_CUDA=0.")


def test_a_source_tree_builds_on_first_use_once_for_two_processes_at_once(source_tree: Tree) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    first, second = source_tree.start(SCAN), source_tree.start(SCAN)
    runs = [finish(first), finish(second)]
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert seconds < 60, "of all cores: half of it on a quiet machine, the time of two imports of PyTorch included"
    for info in map(answer, runs):
        assert (info["engine"], info["native"]) == ("native", "jit")
    module = only(source_tree.cache, "cpu-*/_C*.so")
    assert sum("nanscan: building the CPU engine" in ran.err for ran in runs) == 1
    assert linked_torch_libraries(module) == []

    built = module.stat().st_mtime_ns
    third = source_tree.run(SCAN)
    assert answer(third)["native_path"] == str(module)
    assert "building" not in third.err
    assert module.stat().st_mtime_ns == built


def test_without_a_compiler_the_eager_engine_runs_and_one_warning_says_how_to_get_the_fast_one(
    tiny_tree: Tree, no_compiler: str
) -> None:
    ran = tiny_tree.run(SCAN + "nanscan.scan([torch.ones(3)])\n" * 3, PATH=no_compiler)
    info = answer(ran)
    assert (info["engine"], info["native"]) == ("eager", "failed")
    assert warnings_in(ran.err) == 1
    assert "Prebuilt: " in ran.err
    assert "No c++, g++ or clang++ on PATH." in ran.err
    assert "apt-get install g++" in ran.err
    assert "NANSCAN_ENGINE=eager" in ran.err
    assert str(info["faster"]).startswith("Install a C++17 compiler")
    assert not tiny_tree.cache.exists()


def test_the_eager_engine_on_request_says_nothing_and_builds_nothing(tiny_tree: Tree) -> None:
    ran = tiny_tree.run(SCAN, NANSCAN_ENGINE="eager")
    assert answer(ran)["engine"] == "eager"
    assert ran.err == ""
    assert not tiny_tree.cache.exists()


def test_the_native_engine_on_request_without_a_compiler_raises_with_cause_remedy_and_variable(
    tiny_tree: Tree, no_compiler: str
) -> None:
    code = """
    import torch, nanscan
    for _ in range(2):
        try:
            nanscan.scan([torch.ones(3)])
        except nanscan.EngineError as error:
            assert isinstance(error, RuntimeError)
            print(error)
    """
    ran = tiny_tree.run(code, PATH=no_compiler, NANSCAN_ENGINE="native")
    assert ran.out.count(f"NANSCAN_ENGINE=native can not be met: {NOT_AVAILABLE}") == 2, ran.err
    for words in ("No c++, g++ or clang++ on PATH.", "apt-get install g++", "NANSCAN_ENGINE=eager"):
        assert words in ran.out
    assert ran.err == ""


def test_a_compiler_that_is_named_but_absent_is_said(tiny_tree: Tree) -> None:
    ran = tiny_tree.run(LOAD, CXX="/absent/c++")
    assert ran.out == "None\n"
    assert "CXX=/absent/c++ does not run." in ran.err


def test_without_ninja_the_warning_names_the_command_that_brings_it(tiny_tree: Tree, tmp_path: Path) -> None:
    compiler, calls = fake_compiler(tmp_path, "exit 1")
    (tmp_path / "python").symlink_to(shutil.which("python3") or "/usr/bin/python3")
    code = f"import sys, sysconfig; sys.executable = {str(tmp_path / 'python')!r}\n"
    code += (
        f"sysconfig.get_path = lambda *a, real=sysconfig.get_path: {str(tmp_path)!r} if 'scripts' in a else real(*a)\n"
    )
    ran = tiny_tree.run(code + LOAD, CXX=compiler, PATH=str(tmp_path))
    assert ran.out == "None\n", ran.err
    assert "No ninja, which PyTorch's extension builder needs.\nRun: pip install ninja" in ran.err
    assert not calls.exists()


def test_a_failing_compiler_runs_once_and_both_errors_are_quoted(tiny_tree: Tree, tmp_path: Path) -> None:
    compiler, calls = fake_compiler(tmp_path, "echo 'module.cpp:1:1: error: no such thing' >&2; exit 1")
    ran = tiny_tree.run(LOAD + "\nfor _ in range(3): build.load_native()", CXX=compiler)
    assert ran.out == "None\n"
    assert len(calls.read_text().splitlines()) == 1
    assert warnings_in(ran.err) == 1
    assert f"Prebuilt: {tiny_tree.root}/nanscan has no _C." in ran.err
    assert f"Building on first use: {compiler} failed:" in ran.err
    assert "module.cpp:1:1: error: no such thing" in ran.err
    log = only(tiny_tree.cache, "cpu-*/build.log")
    assert f"The compiler's whole output is in {log}." in ran.err
    assert "no such thing" in log.read_text()


def test_a_cache_folder_that_cannot_be_written_costs_the_engine_not_the_run(tiny_tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = tiny_tree.run(LOAD, NANSCAN_CACHE_DIR=str(tmp_path / "file"))
    assert (ran.code, ran.out) == (0, "None\n"), ran.err
    assert "Set NANSCAN_CACHE_DIR to a folder that can be written." in ran.err


def test_a_changed_source_or_flag_is_built_anew(tiny_tree: Tree) -> None:
    first = tiny_tree.run(LOAD)
    build_json = tiny_tree.root / "csrc" / "build.json"
    build_json.write_text(build_json.read_text().replace("-O1", "-O0"))
    second = tiny_tree.run(LOAD)
    assert first.out != second.out, first.err + second.err
    assert len(list(tiny_tree.cache.glob("cpu-*/_C*.so"))) == 2


def test_a_prebuilt_module_of_other_sources_is_not_used(tiny_tree: Tree) -> None:
    """An editable installation whose C++ sources were edited since."""
    built = Path(tiny_tree.run(LOAD).out.strip())
    prebuilt = tiny_tree.root / "nanscan" / built.name
    shutil.copy(built, prebuilt)
    hash_now = "from nanscan.engine.sources import find_csrc, source_hash; print(source_hash(find_csrc()))"
    record = tiny_tree.root / "nanscan" / "_build.json"
    record.write_text(json.dumps({"source_hash": tiny_tree.run(hash_now).out.strip(), "cpp": "built"}))
    assert tiny_tree.run(LOAD).out == f"{prebuilt}\n"

    with (tiny_tree.root / "csrc" / "module.cpp").open("a") as source:
        source.write("// edited\n")
    ran = tiny_tree.run(LOAD)
    assert ran.out.startswith(str(tiny_tree.cache)), ran.err
    assert ran.out != f"{built}\n"


def test_a_prebuilt_module_that_does_not_load_is_replaced_by_one_built_here(tiny_tree: Tree) -> None:
    built = Path(tiny_tree.run(LOAD).out.strip())
    (tiny_tree.root / "nanscan" / built.name).write_bytes(b"not a shared library")
    code = LOAD + "; print(build.native_outcome().why)"
    ran = tiny_tree.run(code)
    assert ran.out.startswith(f"{built}\n"), ran.err
    assert "importing nanscan._C failed: " in ran.out


def test_engine_info_compiles_nothing_and_says_what_the_first_scan_will_do(tiny_tree: Tree, tmp_path: Path) -> None:
    compiler, calls = fake_compiler(tmp_path, "exit 1")
    code = (
        "import nanscan; info = nanscan.engine_info(); print(info.engine, info.native, info.native_path); print(info)"
    )
    ran = tiny_tree.run(code, CXX=compiler)
    assert ran.out.startswith("native not built None\n"), ran.err
    assert "It is built on the first scan." in ran.out
    assert f"{compiler} (noting 1.0)" in ran.out
    assert not calls.exists()
    assert not tiny_tree.cache.exists()


def test_a_wrong_variable_raises_at_the_first_scan_not_at_import(tiny_tree: Tree) -> None:
    ran = tiny_tree.run(
        "import nanscan; print('imported')\nimport torch; nanscan.scan([torch.ones(1)])", NANSCAN_ENGINE="x"
    )
    assert ran.out == "imported\n"
    assert "ValueError: NANSCAN_ENGINE='x' is not known: use one of auto, native, eager, reference" in ran.err


def test_the_check_for_torch_libraries_would_find_them() -> None:
    import torch

    assert linked_torch_libraries(Path(torch._C.__file__)) or linked_torch_libraries(
        only(Path(torch.__file__).parent, "lib/libtorch_python.so")
    )
