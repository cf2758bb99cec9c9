"""What an installation does about CUDA: never needed, never in the way, never silent."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from nanscan.engine.toolchain import find_cuda
from tests.build_support import Ran, Tree, clean_environment, copy_tree, environment_with, only, wheel_of

FAKE_NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit ;;
--list-gpu-code) echo sm_90; exit ;;
--dryrun) echo "#$ TOP=$(dirname "$0")/.."; exit ;;
esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
{then}
"""
BROKEN = "echo 'scan_cuda.cu(1): error: no such thing'; exit 1"
COMPILES = """printf 'extern "C" int nanscan_fake() { return 42; }' | c++ -shared -x c++ - -o "$out" """


def fake_toolkit(root: Path, then: str) -> Path:
    """A CUDA toolkit whose nvcc does ``then`` instead of compiling."""
    for name in ("include/cuda_runtime.h", "lib/libcudart_static.a", "bin/nvcc"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch(mode=0o755)
    (root / "bin" / "nvcc").write_text(FAKE_NVCC.replace("{then}", then))
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return copy_tree(tmp_path / "tree", tiny=True)


def tiny_wheel(tree: Tree, tmp_path: Path, **variables: str) -> Ran:
    """A wheel without build isolation, which is quicker; `test_build_states` builds one with it."""
    return wheel_of(tree, tmp_path / "wheels", "--no-build-isolation", **variables)


def content(tmp_path: Path) -> tuple[list[str], dict[str, Any]]:
    """The names in the wheel, and the build's own record."""
    with zipfile.ZipFile(only(tmp_path / "wheels", "*.whl")) as wheel:
        return wheel.namelist(), json.loads(wheel.read("nanscan/_build.json"))


def made_by_the_fake(tmp_path: Path) -> bool:
    """Whether the wheel's CUDA library is the one that the fake toolkit makes."""
    with zipfile.ZipFile(only(tmp_path / "wheels", "*.whl")) as wheel:
        return b"nanscan_fake" in wheel.read("nanscan/_cuda.so")


def test_with_a_toolkit_the_wheel_has_both_libraries_and_the_sources(tree: Tree, tmp_path: Path) -> None:
    built = tiny_wheel(tree, tmp_path, CUDA_HOME=str(fake_toolkit(tmp_path / "cuda", COMPILES)))
    assert built.code == 0, built.out + built.err
    names, record = content(tmp_path)
    assert {"nanscan/_cuda.so", "nanscan/csrc/scan_cuda.cu", "nanscan/csrc/module.cpp", "nanscan/py.typed"} <= set(
        names
    )
    assert [name for name in names if re.fullmatch(r"nanscan/_C\..*\.so", name)]
    assert (record["cpp"], record["cuda"]) == ("built", "built")
    assert made_by_the_fake(tmp_path)
    assert not [name for name in names if name.startswith(("tests", "csrc", "benchmarks"))]


def test_a_cuda_build_that_fails_leaves_a_cpu_engine_and_says_so_loudly(tree: Tree, tmp_path: Path) -> None:
    built = tiny_wheel(tree, tmp_path, CUDA_HOME=str(fake_toolkit(tmp_path / "cuda", BROKEN)))
    assert built.code == 0, built.out + built.err
    assert re.search(r"\*{80}\n\s*nanscan\._cuda was NOT built: nvcc failed", built.out + built.err)
    names, record = content(tmp_path)
    assert "nanscan/_cuda.so" not in names
    assert record["cpp"] == "built"
    assert record["cuda"].startswith("failed while installing: nvcc failed with exit status 1: ")
    assert "scan_cuda.cu(1): error: no such thing" in record["cuda"]

    python = environment_with(only(tmp_path / "wheels", "*.whl"), tmp_path / "venv")
    code = "from nanscan.engine import build; print(build.cuda_outcome().why)"
    ran = Tree(tmp_path / "nothing", tmp_path / "cache").run(code, python)
    assert "failed while installing: nvcc failed with exit status 1" in ran.out, ran.err


def test_a_cuda_build_that_was_asked_for_and_fails_fails_the_installation(tree: Tree, tmp_path: Path) -> None:
    broken = str(fake_toolkit(tmp_path / "cuda", BROKEN))
    built = tiny_wheel(tree, tmp_path, CUDA_HOME=broken, NANSCAN_CUDA="1")
    assert built.code != 0
    assert "error: nanscan._cuda: nvcc failed with exit status 1" in built.out + built.err


def test_a_cuda_build_that_was_asked_for_without_a_toolkit_says_what_was_tried(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("c++", "cc", "gcc", "g++", "as", "ld"):
        (tmp_path / "bin" / name).symlink_to(Path("/usr/bin", name))
    built = tiny_wheel(tree, tmp_path, CUDA_HOME=str(tmp_path), NANSCAN_CUDA="1", PATH=str(tmp_path / "bin"))
    assert built.code != 0
    assert (
        f"NANSCAN_CUDA=1, but there is no CUDA toolkit. CUDA_HOME={tmp_path} has no bin/nvcc." in built.out + built.err
    )


def test_cuda_that_was_turned_off_is_not_built(tree: Tree, tmp_path: Path) -> None:
    toolkit = str(fake_toolkit(tmp_path / "cuda", COMPILES))
    built = tiny_wheel(tree, tmp_path, CUDA_HOME=toolkit, NANSCAN_CUDA="0")
    assert built.code == 0, built.out + built.err
    names, record = content(tmp_path)
    assert "nanscan/_cuda.so" not in names
    assert record["cuda"].startswith("Not built while installing, NANSCAN_CUDA=0.")


def test_without_a_compiler_the_installation_succeeds_with_the_eager_engine(tree: Tree, tmp_path: Path) -> None:
    none = {"CC": "/absent/cc", "CXX": "/absent/c++", "NANSCAN_CUDA": "0"}
    built = tiny_wheel(tree, tmp_path, **none)
    assert built.code == 0, built.out + built.err
    names, record = content(tmp_path)
    assert not [name for name in names if name.endswith(".so")]
    assert record["cpp"].startswith("failed while installing: ")
    asked = tiny_wheel(copy_tree(tmp_path / "again", tiny=True), tmp_path, **none, NANSCAN_ENGINE="native")
    assert asked.code != 0


def test_an_isolated_build_finds_pips_own_toolkit_before_the_one_on_path(tree: Tree, tmp_path: Path) -> None:
    """pip hides the outer site-packages from an isolated build; nvidia/cu13 is found there all the same."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    site = only(tmp_path / "venv", "lib/python*/site-packages")
    fake_toolkit(site / "nvidia" / "cu13", COMPILES)
    (site / "hidden.py").write_text("")
    setup = tree.root / "setup.py"
    hidden = "import importlib.util\nassert importlib.util.find_spec('hidden') is None, 'this build is not isolated'\n"
    setup.write_text(setup.read_text().replace("import json\n", f"{hidden}import json\n", 1))
    built = wheel_of(tree, tmp_path / "wheels", python=str(tmp_path / "venv" / "bin" / "python"))
    assert built.code == 0, built.out + built.err
    names, record = content(tmp_path)
    assert "nanscan/_cuda.so" in names
    assert record["cuda"] == "built"
    assert made_by_the_fake(tmp_path)


def test_an_editable_installation_builds_both_libraries_in_place(tree: Tree, tmp_path: Path) -> None:
    toolkit = str(fake_toolkit(tmp_path / "cuda", COMPILES))
    environment = clean_environment(tree.cache) | {"CUDA_HOME": toolkit}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=60)
    python = tmp_path / "venv" / "bin" / "python"
    site = only(tmp_path / "venv", "lib/python*/site-packages")
    (site / "outer.pth").write_text(f"{Path(pytest.__file__).parent.parent}\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    command += ["--no-build-isolation", "-e", str(tree.root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    code = "from nanscan.engine import build; print(build.load_native().__file__, build.load_cuda_library(), sep='\\n')"
    ran = Tree(tmp_path / "nothing", tmp_path / "cache").run(code, str(python))
    module, library = (Path(line) for line in ran.out.splitlines())
    assert module == only(tree.root / "nanscan", "_C*.so"), ran.err
    assert library == tree.root / "nanscan" / "_cuda.so"
    assert ctypes.CDLL(str(library)).nanscan_fake() == 42


def test_the_real_cuda_library_builds_and_loads_without_a_gpu(tmp_path: Path) -> None:
    """For one architecture, which takes seconds; ``make cuda`` compiles all."""
    if find_cuda() is None:
        pytest.skip("no CUDA toolkit here")
    tree = copy_tree(tmp_path / "tree")
    code = """
    import torch
    torch.version.cuda = torch.version.cuda or "13.0"  # as a CUDA build of PyTorch says
    from nanscan.engine import build
    print(build.load_cuda_library())
    """
    ran = tree.run(code, NANSCAN_CUDA_ARCHS="90", NANSCAN_CUDA="1")
    assert ran.code == 0, ran.err
    library = only(tree.cache, "cuda-*/_cuda.so")
    assert ran.out == f"{library}\n"
    assert ran.err.count("nanscan: building the CUDA engine") == 1
    assert ctypes.CDLL(str(library)).nanscan_cuda_api
    needed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "libstdc++" in needed
    assert not re.search(r"NEEDED.*lib(cuda|torch|c10)", needed)


def test_pytorch_without_cuda_never_builds_the_cuda_library(tree: Tree, tmp_path: Path) -> None:
    toolkit = str(fake_toolkit(tmp_path / "cuda", COMPILES))
    code = """
    import torch
    torch.version.cuda = None
    from nanscan.engine import build
    print(build.cuda_outcome().how, build.load_cuda_library())
    """
    ran = tree.run(code, CUDA_HOME=toolkit)
    assert ran.out == "not needed None\n", ran.err
    assert "This PyTorch is built without CUDA." in ran.err
    assert not tree.cache.exists()
    assert "NANSCAN_CUDA=1 can not be met" in tree.run(code, CUDA_HOME=toolkit, NANSCAN_CUDA="1").err


def test_the_cuda_library_is_built_on_first_use_for_the_gpus_that_are_there(tree: Tree, tmp_path: Path) -> None:
    toolkit = str(fake_toolkit(tmp_path / "cuda", COMPILES))
    code = """
    import torch
    torch.version.cuda = "13.0"
    torch.cuda.device_count, torch.cuda.get_device_capability = lambda: 2, lambda device: ((9, 0), (9, {minor}))[device]
    from nanscan.engine import build, toolchain
    build.toolchain.run_nvcc = lambda command, run=toolchain.run_nvcc: (print(*command), run(command))[1]
    print(build.cuda_outcome(may_compile=False).how)
    print(build.load_cuda_library())
    """
    known = tree.run(code.replace("{minor}", "0"), CUDA_HOME=toolkit)
    library = only(tree.cache, "cuda-*/_cuda.so")
    first, command, last = known.out.splitlines()
    assert (first, last) == ("not built", str(library)), known.err
    assert "-gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_90,code=compute_90" in command
    newer_than_nvcc = tree.run(code.replace("{minor}", "5"), CUDA_HOME=toolkit)
    assert " -arch=all " in newer_than_nvcc.out, newer_than_nvcc.err
    assert len(list(tree.cache.glob("cuda-*/_cuda.so"))) == 2


def test_a_cuda_build_on_first_use_that_fails_warns_once_and_costs_the_run_nothing(tree: Tree, tmp_path: Path) -> None:
    toolkit = str(fake_toolkit(tmp_path / "cuda", BROKEN))
    code = """
    import torch
    torch.version.cuda = "13.0"
    from nanscan.engine import build
    print([build.load_cuda_library() for _ in range(3)])
    """
    ran = tree.run(code, CUDA_HOME=toolkit)
    assert ran.out == "[None, None, None]\n", ran.err
    assert ran.err.count("the CUDA engine is not available") == 1
    assert ran.err.count("building the CUDA engine") == 1
    assert "scan_cuda.cu(1): error: no such thing" in ran.err
    assert "NANSCAN_CUDA=0 chooses PyTorch operations" in ran.err
