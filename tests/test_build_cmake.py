"""CMake and the source distribution: the same sources and flags as everywhere, and nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.build_support import ROOT, Tree, copy_tree, only


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = copy_tree(tmp_path / "tree", tiny=True)
    shutil.copy(ROOT / "CMakeLists.txt", tree.root)
    return tree


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_cmake_builds_the_module_from_the_one_list_of_sources_and_flags(tree: Tree) -> None:
    cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")
    if not Path(cmake).exists():
        pytest.skip("no cmake here")
    spec = {"sources": ["module.cpp", "second.cpp"], "flags": ["-O1", "-DNANSCAN_MARK=1"], "link_flags": ["-pthread"]}
    build_json = json.loads((tree.root / "csrc" / "build.json").read_text())
    (tree.root / "csrc" / "build.json").write_text(json.dumps(build_json | {"cpp": spec}))
    (tree.root / "csrc" / "second.cpp").write_text("static_assert(NANSCAN_MARK == 1);\nint nanscan_second = 2;\n")
    run(cmake, "-S", ".", "-B", "out", f"-DPython_EXECUTABLE={sys.executable}", cwd=tree.root)
    run(cmake, "--build", "out", "-j2", cwd=tree.root)

    compiled = {
        Path(entry["file"]).name: entry["command"]
        for entry in json.loads((tree.root / "out" / "compile_commands.json").read_text())
    }
    assert set(compiled) == {"module.cpp", "second.cpp"}
    assert all(" -O1 -DNANSCAN_MARK=1 " in command for command in compiled.values())
    assert only(tree.root / "out", "_C*.so").is_file()
    assert run(sys.executable, "-c", "import _C; print(_C.__doc__)", cwd=tree.root / "out") == "a small one\n"


def test_every_source_in_csrc_is_in_the_list_and_the_other_way_round() -> None:
    spec = json.loads((ROOT / "csrc" / "build.json").read_text())
    listed = [*spec["cpp"]["sources"], *spec["cuda"]["sources"]]
    for unit in [name for name in listed if name.startswith("unit_")]:  # several sources that are compiled as one
        listed += re.findall(r'^#include "(.+\.cpp)"$', (ROOT / "csrc" / unit).read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "csrc").iterdir() if path.suffix in (".cpp", ".cu"))


def test_one_source_alone_includes_the_header_that_takes_seconds() -> None:
    files = [path for path in (ROOT / "csrc").iterdir() if path.suffix in (".cpp", ".h")]
    costly = [path.name for path in files if re.search(r"#include <pybind11/(?!pytypes\.h)", path.read_text())]
    assert costly == ["module.cpp"]


def test_the_source_distribution_has_what_a_build_and_its_tests_need(tree: Tree) -> None:
    shutil.copytree(ROOT / "tests", tree.root / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from setuptools.build_meta import build_sdist; print(build_sdist('dist'))"
    run(sys.executable, "-c", code, cwd=tree.root)
    with tarfile.open(only(tree.root / "dist", "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"csrc/build.json", "csrc/module.cpp", "csrc/scan_cuda.cu", "setup.py", "CMakeLists.txt"} <= names
    assert {"tests/conftest.py", "tests/cpp/CMakeLists.txt", "nanscan/py.typed", "LICENSE"} <= names
    assert not [name for name in names if name.endswith(".so")]
