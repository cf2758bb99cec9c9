"""Source trees, environments and processes in which the three states of an installation are really lived through."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = sysconfig.get_path("purelib")

TINY_BUILD = """{"cpp": {"sources": ["module.cpp"], "flags": ["-O1"], "link_flags": []},
 "cuda": {"sources": ["scan_cuda.cu"], "flags": [], "library": "_cuda.so"}}"""
# The smallest module that loads: it compiles in a second, where only the building is tested.
TINY_MODULE = """#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", "a small one", -1, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&definition); }
"""
TINY_CUDA = 'extern "C" int nanscan_tiny() { return 42; }\n'


@dataclass(frozen=True)
class Ran:
    """What a process left behind."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Tree:
    """A copy of the sources with nothing compiled, and the variables its processes get."""

    root: Path
    cache: Path
    variables: dict[str, str] = field(default_factory=dict)

    def start(self, code: str, python: str = sys.executable, **variables: str) -> subprocess.Popen[str]:
        """Start Python on ``code``, with this tree's nanscan."""
        env = clean_environment(self.cache) | {"PYTHONPATH": str(self.root)} | self.variables | variables
        command = [python, "-c", textwrap.dedent(code)]
        pipe, cwd = subprocess.PIPE, self.cache.parent
        return subprocess.Popen(command, env=env, cwd=cwd, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    def run(self, code: str, python: str = sys.executable, **variables: str) -> Ran:
        """Run Python on ``code``, with this tree's nanscan, to its end."""
        return finish(self.start(code, python, **variables))


def finish(process: subprocess.Popen[str], timeout: float = 240) -> Ran:
    """Wait for a process's end."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Ran(process.returncode, out, err)


def clean_environment(cache: Path) -> dict[str, str]:
    """This process's environment without what would choose a compiler, an engine or a module search path."""
    unwanted = ("NANSCAN_", "CUDA_", "PYTHON", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    for name in ("CXX", "CC", "CXXFLAGS", "CFLAGS", "LDFLAGS"):
        env.pop(name, None)
    return env | {"NANSCAN_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}


def copy_tree(folder: Path, tiny: bool = False) -> Tree:
    """Copy the sources to ``folder``; ``tiny`` puts a module in that compiles in a second and does nothing."""
    ignored = shutil.ignore_patterns("*.so", "_build.json", "__pycache__")
    for name in ("nanscan", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, folder)
    if tiny:
        shutil.rmtree(folder / "csrc")
        (folder / "csrc").mkdir()
        (folder / "csrc" / "build.json").write_text(TINY_BUILD)
        (folder / "csrc" / "module.cpp").write_text(TINY_MODULE)
        (folder / "csrc" / "scan_cuda.cu").write_text(TINY_CUDA)
    return Tree(folder, folder.parent / "cache")


def wheel_of(tree: Tree, into: Path, *arguments: str, python: str = sys.executable, **variables: str) -> Ran:
    """Run ``pip wheel`` on a tree."""
    command = [python, "-m", "pip", "wheel", "-v", "--no-deps", "-w", str(into), *arguments, str(tree.root)]
    env = clean_environment(tree.cache) | variables
    done = subprocess.run(command, env=env, cwd=into.parent, capture_output=True, text=True, timeout=400, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


def only(folder: Path, pattern: str) -> Path:
    """The one path in ``folder`` that matches."""
    found = list(folder.glob(pattern))
    assert len(found) == 1, f"{pattern} in {folder}: {found}"
    return found[0]


def environment_with(wheel: Path, folder: Path) -> str:
    """A fresh virtual environment with the wheel in it and this environment's PyTorch in reach; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    python = str(folder / "bin" / "python")
    site = only(folder, "lib/python*/site-packages")
    (site / "outer.pth").write_text(f"{SITE}\n")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    return python


def fake_compiler(folder: Path, then: str) -> tuple[str, Path]:
    """A C++ compiler that notes each compilation in a file and runs the shell command ``then`` for it."""
    calls, path = folder / "calls.txt", folder / "noting-c++"
    path.write_text(
        f"""#!/bin/sh
case " $* " in
*" --version "*) echo "noting 1.0" ;;
*" -c "*) echo "$@" >> {calls}; {then} ;;
*" -shared "*) exec c++ "$@" ;;
esac
"""
    )
    path.chmod(0o755)
    return str(path), calls


def linked_torch_libraries(library: Path) -> list[str]:
    """PyTorch's libraries that a shared library is linked to."""
    done = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True)
    needed = [line.split("[")[1].rstrip("]") for line in done.stdout.splitlines() if "(NEEDED)" in line]
    assert needed, f"{library} is linked to nothing at all: is it a shared library?"
    return [name for name in needed if name.startswith(("libtorch", "libc10"))]
