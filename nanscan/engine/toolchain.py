"""What can compile here: the C++ compiler and the CUDA toolkit, found without asking whether a GPU is visible.

Only the standard library is imported here: ``setup.py`` loads this module before nanscan is installed. The variables
read here (``CXX``, ``CUDA_HOME``, ``CUDA_PATH``, ``PATH``, ``VIRTUAL_ENV``) are everybody's; those of nanscan are in
`nanscan.config`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanscan.engine.sources import Spec

__all__ = [
    "Compiler",
    "CudaSearch",
    "CudaToolkit",
    "find_cuda",
    "find_cxx",
    "find_ninja",
    "known_archs",
    "nvcc_command",
    "run_nvcc",
    "search_cuda",
]


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler."""

    command: str  # as a shell would take it: a path, perhaps behind a launcher such as ccache
    version: str  # first line of --version

    def __str__(self) -> str:
        return f"{self.command} ({self.version})"


@dataclass(frozen=True)
class CudaToolkit:
    """A CUDA toolkit that can compile and link: nvcc, the runtime's headers and its static library."""

    root: Path
    nvcc: Path
    include_dirs: tuple[Path, ...]  # those that hold cuda_runtime.h
    lib_dirs: tuple[Path, ...]  # those that hold libcudart_static.a
    found_by: str  # "CUDA_HOME", "pip" or "PATH"
    version: str  # such as "13.0"

    def __str__(self) -> str:
        return f"CUDA {self.version} at {self.root} (found by {self.found_by})"


@dataclass(frozen=True)
class CudaSearch:
    """The outcome of looking for a toolkit: the toolkit, or what was tried in vain."""

    toolkit: CudaToolkit | None
    tried: tuple[str, ...]  # one sentence for each place that had none, in the order of the search


def find_cxx(environ: Mapping[str, str] | None = None) -> Compiler | None:
    """The C++ compiler: ``CXX`` if set, else the first of ``c++``, ``g++`` and ``clang++`` on ``PATH``.

    Returns:
        The compiler, or None if there is none that runs.
    """
    env = os.environ if environ is None else environ
    names = [env["CXX"]] if env.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        program, *rest = shlex.split(name)
        path = shutil.which(program, path=env.get("PATH", ""))
        if path and (output := _output([path, *rest, "--version"])):
            return Compiler(shlex.join([path, *rest]), output.splitlines()[0].strip())
    return None


def find_ninja(environ: Mapping[str, str] | None = None) -> str | None:
    """The ninja on ``PATH``, else the one that pip put beside this Python (its folder need not be on ``PATH``)."""
    env = os.environ if environ is None else environ
    beside = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    return shutil.which("ninja", path=os.pathsep.join([env.get("PATH", ""), *beside]))


def find_cuda() -> CudaToolkit | None:
    """The CUDA toolkit of this process's environment (see `search_cuda`), or None."""
    return search_cuda().toolkit


def search_cuda(environ: Mapping[str, str] | None = None, site_dirs: Sequence[Path] | None = None) -> CudaSearch:
    """Look for a CUDA toolkit: ``CUDA_HOME`` (or ``CUDA_PATH``), pip's ``nvidia/cu13``, then nvcc on ``PATH``.

    No GPU and no driver is needed. A place without nvcc, ``cuda_runtime.h`` or ``libcudart_static.a`` is passed over.

    Args:
        environ: the environment's variables; default: those of this process.
        site_dirs: folders that pip installs into; default: those of this Python and of ``VIRTUAL_ENV``.

    Returns:
        The toolkit, and one sentence on each place that was looked at in vain.
    """
    env = os.environ if environ is None else environ
    sites = _site_dirs(env) if site_dirs is None else list(site_dirs)
    tried: list[str] = []
    for found_by, nvcc in _nvcc_candidates(env, sites, tried):
        toolkit = _inspect(nvcc, found_by, sites)
        if isinstance(toolkit, CudaToolkit):
            return CudaSearch(toolkit, tuple(tried))
        tried.append(toolkit)
    return CudaSearch(None, tuple(tried))


def nvcc_command(
    toolkit: CudaToolkit,
    spec: Spec,
    output: Path,
    archs: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """The command that makes the shared library ``output`` of the CUDA sources, with the CUDA runtime inside.

    Args:
        toolkit: whose nvcc runs.
        spec: names the sources and the flags.
        output: the library's path.
        archs: compute capabilities such as ``90``; default: every one the toolkit knows. The newest one's PTX is
            added, for GPUs that are newer still.
        environ: the environment's variables, of which ``CXX`` is read; default: those of this process.
    """
    cxx = (os.environ if environ is None else environ).get("CXX", "")
    return [
        str(toolkit.nvcc),
        *spec.cuda.flags,
        *_arch_flags(archs),
        *(["-ccbin", cxx] if cxx and " " not in cxx else []),  # nvcc takes no launcher such as "ccache g++"
        *(f"-I{folder}" for folder in (spec.csrc, *toolkit.include_dirs)),
        *("-shared", "-cudart", "static", "-Xcompiler", "-fPIC"),
        *(f"-L{folder}" for folder in toolkit.lib_dirs),
        *(str(spec.csrc / source) for source in spec.cuda.sources),
        *("-o", str(output)),
    ]


def known_archs(toolkit: CudaToolkit) -> frozenset[str]:
    """The compute capabilities that the toolkit compiles for, such as ``90``."""
    listed = _output([str(toolkit.nvcc), "--list-gpu-code"]) or ""
    return frozenset(re.findall(r"^sm_(\d+)$", listed, re.MULTILINE))


def run_nvcc(command: Sequence[str]) -> str:
    """Run a command made by `nvcc_command`.

    Returns:
        What the compiler printed (ptxas's report of registers and spills, where the flags ask for it).

    Raises:
        RuntimeError: nvcc failed or can't be run; the message holds the command and the output.
    """
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    except OSError as error:
        raise RuntimeError(f"{command[0]} can't be run: {error}") from error
    output = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        raise RuntimeError(f"nvcc failed with exit status {done.returncode}: {shlex.join(command)}\n{output}")
    return output


def _arch_flags(archs: Sequence[str]) -> list[str]:
    if not archs:
        return ["-arch=all"]
    codes = [f"arch=compute_{arch},code=sm_{arch}" for arch in archs]
    newest = max(archs, key=lambda arch: int(arch.rstrip("af")))
    return [f"-gencode={code}" for code in [*codes, f"arch=compute_{newest},code=compute_{newest}"]]


def _nvcc_candidates(env: Mapping[str, str], sites: Sequence[Path], tried: list[str]) -> Iterator[tuple[str, Path]]:
    """Every nvcc there is, best first; places without one are noted in ``tried``."""
    home_name = next((name for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)), None)
    if home_name is None:
        tried.append("CUDA_HOME is not set.")
    elif (nvcc := Path(env[home_name]) / "bin" / "nvcc").is_file():
        yield home_name, nvcc
    else:
        tried.append(f"{home_name}={env[home_name]} has no bin/nvcc.")
    in_sites = [nvcc for site in sites for nvcc in sorted(site.glob("nvidia/cu[0-9]*/bin/nvcc"), reverse=True)]
    yield from (("pip", nvcc) for nvcc in in_sites)
    if not in_sites:
        tried.append("No nvidia/cu13/bin/nvcc in Python's site-packages.")
    if on_path := shutil.which("nvcc", path=env.get("PATH", "")):
        yield "PATH", Path(on_path)
    else:
        tried.append("No nvcc on PATH.")


def _inspect(nvcc: Path, found_by: str, sites: Sequence[Path]) -> CudaToolkit | str:
    """The toolkit that ``nvcc`` belongs to, or a sentence on why it can't be used."""
    root = _toolkit_root(nvcc)
    if root is None:
        return f"{nvcc} does not run, or does not say which toolkit it belongs to."
    real = root / "bin" / "nvcc"
    version = re.search(r"release (\d+\.\d+)", _output([str(real), "--version"]) or "")
    if version is None:
        return f"{real} does not run."
    includes = _holding("cuda_runtime.h", [root / "include", *root.glob("targets/*/include")])
    if not includes:
        return f"The toolkit at {root} has no include/cuda_runtime.h."
    places = [root / "lib64", root / "lib", *root.glob("targets/*/lib"), *_runtime_libs(sites, version[1])]
    libs = _holding("libcudart_static.a", places)
    if not libs:
        return f"The toolkit at {root} has no libcudart_static.a, and no nvidia-cuda-runtime package has it."
    return CudaToolkit(root, real, includes[:1], libs[:1], found_by, version[1])


def _toolkit_root(nvcc: Path) -> Path | None:
    """The toolkit's folder: where nvcc lies, or, for a wrapper script, what the nvcc that it runs says of itself."""
    real = nvcc.resolve()
    if not _is_script(real):
        return real.parent.parent
    told = re.search(r"^#\$ TOP=(.+)$", _output([str(nvcc), "--dryrun", "-c", "nanscan-probe.cu"]) or "", re.MULTILINE)
    root = Path(told[1].strip()).resolve() if told else None
    return root if root is not None and (root / "bin" / "nvcc").is_file() else None


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def _holding(name: str, folders: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(folder for folder in folders if (folder / name).is_file())


def _runtime_libs(sites: Sequence[Path], version: str) -> list[Path]:
    """Where the nvidia-cuda-runtime package of the same major version puts its libraries."""
    return [site / "nvidia" / f"cu{version.split('.')[0]}" / "lib" for site in sites]


def _site_dirs(env: Mapping[str, str]) -> list[Path]:
    """The folders that pip installs into.

    pip's isolated build environment takes the outer site-packages off ``sys.path`` but runs the same Python, so that
    `sysconfig` still names it. Tools that build in an environment of their own (uv, build) hide it altogether: there
    ``VIRTUAL_ENV`` helps if it is activated, and else ``CUDA_HOME`` has to be given.
    """
    paths = [entry for entry in sys.path if entry.endswith("-packages")]
    paths += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if venv := env.get("VIRTUAL_ENV"):
        paths.append(f"{venv}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages")
    return [Path(path) for path in dict.fromkeys(paths)]


def _output(command: Sequence[str]) -> str | None:
    """What a short command prints (both streams), or None if it can't be run or hangs."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
