"""Gets the compiled parts of the engine: prebuilt by the installation, else built on first use, else not at all.

Nothing here runs at import. A failure is remembered for the life of the process, so that it costs once.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from nanscan.config import Config, load_config
from nanscan.engine import toolchain
from nanscan.engine.build_cache import BuildFailed, build_once
from nanscan.engine.sources import PACKAGE, Spec, find_csrc, read_spec, source_hash
from nanscan.errors import EngineError

__all__ = ["Outcome", "cuda_outcome", "load_cuda_library", "load_native", "native_outcome"]

NATIVE_NAME = "nanscan._C"
GET_COMPILER = "Install a C++17 compiler, for example: apt-get install g++ (or: conda install cxx-compiler)."
GET_NINJA = "Run: pip install ninja (or: pip install 'nanscan[jit]')."
GET_TOOLKIT = "Run: pip install 'nanscan[cuda13]' (or set CUDA_HOME to a CUDA toolkit)."
# PyTorch's loader names its own libraries on the link line; this way nothing is left for them to resolve (they export
# parts of the C++ library too, hence that one first).
LINK_NO_TORCH = ("-Wl,--as-needed", "-lstdc++") if sys.platform == "linux" else ()
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of getting one compiled part."""

    value: T | None
    how: str  # "prebuilt", "jit", "not built" (not tried yet), "failed", "not needed" or "not asked for"
    why: str  # one or more whole sentences
    remedy: str = ""  # how to get it, if it is missing


class _Once(Generic[T]):
    """Remembers the outcome of an attempt for the life of the process, in all threads."""

    def __init__(self) -> None:
        self.outcome: Outcome[T] | None = None
        self.warned = False
        self._lock = threading.Lock()

    def get(self, attempt: Callable[[], Outcome[T]]) -> Outcome[T]:
        with self._lock:
            if self.outcome is None or self.outcome.how == "not built":
                self.outcome = attempt()
            return self.outcome


_native: _Once[ModuleType] = _Once()
_cuda: _Once[Path] = _Once()


def load_native(required: bool | None = None) -> ModuleType | None:
    """The module ``nanscan._C``: prebuilt, else built on first use (about 10 s), else None and one warning.

    Args:
        required: raise instead of returning None; default: whether ``NANSCAN_ENGINE=native`` asks for it.

    Raises:
        EngineError: the module is required and can't be had.
    """
    config = load_config()
    outcome = native_outcome()
    if outcome.value is None:
        asked = "NANSCAN_ENGINE=native" if config.engine == "native" else ""
        text = (
            f"{outcome.why}\n{outcome.remedy}\nNANSCAN_ENGINE=eager chooses the engine of PyTorch operations, silently"
        )
        must = bool(asked) if required is None else required
        _complain(_native, "the compiled engine is not available", text, must, asked)
    return outcome.value


def load_cuda_library(required: bool | None = None) -> Path | None:
    """The shared library of the CUDA kernels: prebuilt, else built on first use by nvcc, else None and one warning.

    Args:
        required: raise instead of returning None; default: whether ``NANSCAN_CUDA=1`` or ``NANSCAN_ENGINE=native``
            asks for it.

    Raises:
        EngineError: the library is required and can't be had.
    """
    outcome = cuda_outcome()
    if outcome.value is None and load_config().cuda != "0":
        refuse_cuda(f"{outcome.why}\n{outcome.remedy}", required)
    return outcome.value


def refuse_cuda(why: str, required: bool | None = None) -> None:
    """Say that the CUDA library does not serve, and why: one warning, or an `EngineError` where it is required."""
    config = load_config()
    asked = "NANSCAN_CUDA=1" if config.cuda == "1" else "NANSCAN_ENGINE=native" if config.engine == "native" else ""
    text = f"{why}\nNANSCAN_CUDA=0 chooses PyTorch operations for CUDA tensors, silently"
    must = bool(asked) if required is None else required
    _complain(_cuda, "the CUDA engine is not available", text, must, asked)


def native_outcome(may_compile: bool = True) -> Outcome[ModuleType]:
    """Load ``nanscan._C`` if that was not tried yet; without ``may_compile``, only one that is built already."""
    return _native.get(lambda: _attempt_native(load_config(), may_compile))


def cuda_outcome(may_compile: bool = True) -> Outcome[Path]:
    """Find the CUDA library if that was not tried yet; without ``may_compile``, only one that is built already."""
    return _cuda.get(lambda: _attempt_cuda(load_config(), may_compile))


def _complain(once: _Once[Any], what: str, text: str, must: bool, asked: str) -> None:
    """Raise if it must be there, else warn, once in this process."""
    if must:
        raise EngineError(f"{asked + ' can not be met: ' if asked else ''}{what}.\n{text}.")
    if not once.warned:
        once.warned = True
        warnings.warn(
            f"nanscan: {what}; PyTorch operations do its work, slower.\n{text}.", RuntimeWarning, stacklevel=4
        )


def _attempt_native(config: Config, may_compile: bool) -> Outcome[ModuleType]:
    module, no_prebuilt = _import_prebuilt()
    if module is not None:
        return Outcome(module, "prebuilt", f"prebuilt by the installation: {module.__file__}")
    try:
        target, build = _plan_native()
        if not target.exists() and not may_compile:
            return Outcome(None, "not built", f"{no_prebuilt} It is built on the first scan.")
        build_once(target, "the CPU engine (about 10 s)", build, config.build_timeout)
        return Outcome(_import_file(target), "jit", f"built on first use: {target}. {no_prebuilt}")
    except BuildFailed as error:
        why = f"Prebuilt: {no_prebuilt}\nBuilding on first use: {error.cause}"
        return Outcome(None, "failed", why, error.remedy)


def _import_prebuilt() -> tuple[ModuleType | None, str]:
    """The module that the installation compiled, or a sentence on why there is none."""
    # Looked for in this folder only: an editable installation of another tree would offer its own binary.
    if importlib.machinery.PathFinder.find_spec(NATIVE_NAME, [str(PACKAGE)]) is None:
        return None, f"{PACKAGE} has no _C{sysconfig.get_config_var('EXT_SUFFIX')}."
    if unfit := _unfit("cpp"):
        return None, unfit
    try:
        return importlib.import_module(NATIVE_NAME), ""
    except ImportError as error:
        return None, f"importing {NATIVE_NAME} failed: {error}."


def build_record() -> dict[str, str]:
    """What ``setup.py`` noted of the installation's build (``_build.json``); empty if there was none."""
    try:
        record: dict[str, str] = json.loads((PACKAGE / "_build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record


def _unfit(part: str) -> str:
    """A sentence, if what the installation left of a part ("cpp" or "cuda") must not be used."""
    record = build_record()
    if record.get(part, "built") != "built":  # the file that lies there is of an earlier installation
        return f"{record[part].rstrip('.')}."
    try:
        current = record.get("source_hash") in (None, source_hash(find_csrc()))
    except FileNotFoundError:  # a binary without its sources: nothing to compare with
        return ""
    return "" if current else f"what {PACKAGE} has was made of other sources; pip install -e . renews it."


def _plan_native() -> tuple[Path, Callable[[Path], Path]]:
    """Where the module belongs in the cache, and the function that builds it."""
    spec = _spec()
    compiler = toolchain.find_cxx()
    if compiler is None:
        asked = os.environ.get("CXX")
        raise BuildFailed(f"CXX={asked} does not run." if asked else "No c++, g++ or clang++ on PATH.", GET_COMPILER)
    ninja = toolchain.find_ninja()
    if ninja is None:
        raise BuildFailed("No ninja, which PyTorch's extension builder needs.", GET_NINJA)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    key = _key(spec, str(compiler), suffix, platform.machine(), *platform.libc_ver())
    target = load_config().cache_dir / f"cpu-{key}" / f"_C{suffix}"
    return target, lambda work: _compile_native(spec, compiler, ninja, work)


def _compile_native(spec: Spec, compiler: toolchain.Compiler, ninja: str, work: Path) -> Path:
    """Compile ``nanscan._C`` by PyTorch's loader, in a new folder: no stale lock of the loader can be there."""
    name = f"nanscan_{work.parent.name.replace('-', '_')}"  # the loader renames what it has loaded before
    try:
        from torch.utils import cpp_extension

        with _environment(CXX=compiler.command, PATH=f"{Path(ninja).parent}{os.pathsep}{os.environ.get('PATH', '')}"):
            cpp_extension.load(
                name=name,
                sources=[str(spec.csrc / source) for source in spec.cpp.sources],
                extra_cflags=list(spec.cpp.flags),
                extra_ldflags=[*LINK_NO_TORCH, *spec.cpp.link_flags],
                extra_include_paths=[str(spec.csrc), *_pybind11_include()],
                build_directory=str(work),
                verbose=load_config().verbose,
                with_cuda=False,
                is_python_module=False,  # imported from its final place
            )
    except Exception as error:
        raise _compile_failed(work.parent, compiler.command, str(error)) from error
    return work / f"{name}.so"


def _pybind11_include() -> list[str]:
    """pybind11's headers; without the package, the copy in PyTorch's include folder serves."""
    if importlib.util.find_spec("pybind11") is None:
        return []
    import pybind11

    return [str(pybind11.get_include())]


def _attempt_cuda(config: Config, may_compile: bool) -> Outcome[Path]:
    if config.cuda == "0":
        return Outcome(None, "not asked for", "NANSCAN_CUDA=0 turns it off.")
    no_prebuilt = ""
    try:
        spec = _spec()
        no_prebuilt = _no_prebuilt_cuda(spec)
        if not no_prebuilt:
            prebuilt = PACKAGE / spec.cuda.file_name
            return Outcome(prebuilt, "prebuilt", f"prebuilt by the installation: {prebuilt}")
        if not _torch_has_cuda():
            how = "failed" if config.cuda == "1" else "not needed"
            why = f"This PyTorch is built without CUDA. {no_prebuilt}"
            return Outcome(None, how, why, "Install a CUDA build of PyTorch.")
        target, build = _plan_cuda(spec)
        if not target.exists() and not may_compile:
            return Outcome(None, "not built", f"{no_prebuilt} It is built on the first scan of a CUDA tensor.")
        build_once(target, "the CUDA engine (10 s to a minute)", build, config.build_timeout)
        return Outcome(target, "jit", f"built on first use: {target}. {no_prebuilt}")
    except BuildFailed as error:
        return Outcome(None, "failed", f"Prebuilt: {no_prebuilt}\nBuilding on first use: {error.cause}", error.remedy)


def _no_prebuilt_cuda(spec: Spec) -> str:
    """Why the installation's CUDA library can't be used; empty if it can."""
    if (PACKAGE / spec.cuda.file_name).is_file():
        return _unfit("cuda")
    return build_record().get("cuda", f"{PACKAGE} has no {spec.cuda.file_name}.")


def _torch_has_cuda() -> bool:
    """Whether PyTorch is built with CUDA, which a machine without a GPU can tell."""
    import torch

    return torch.version.cuda is not None


def _plan_cuda(spec: Spec) -> tuple[Path, Callable[[Path], Path]]:
    """Where the CUDA library belongs in the cache, and the function that builds it."""
    search = toolchain.search_cuda()
    if search.toolkit is None:
        raise BuildFailed(f"No CUDA toolkit: {' '.join(search.tried)}", GET_TOOLKIT)
    toolkit = search.toolkit
    archs = load_config().cuda_archs or _visible_archs(toolkit)
    command = toolchain.nvcc_command(toolkit, spec, Path(spec.cuda.file_name), archs)
    key = _key(spec, toolkit.version, *command, platform.machine(), *platform.libc_ver())
    target = load_config().cache_dir / f"cuda-{key}" / spec.cuda.file_name

    def build(work: Path) -> Path:
        product = work / spec.cuda.file_name
        try:
            output = toolchain.run_nvcc(toolchain.nvcc_command(toolkit, spec, product, archs))
        except RuntimeError as error:
            raise _compile_failed(target.parent, str(toolkit.nvcc), str(error)) from error
        if load_config().verbose:
            print(output, file=sys.stderr)
        return product

    return target, build


def _visible_archs(toolkit: toolchain.CudaToolkit) -> tuple[str, ...]:
    """The compute capabilities of the GPUs here; none (which means all) if a GPU is not seen, or newer than nvcc."""
    import torch

    devices = range(torch.cuda.device_count())
    archs = {"".join(map(str, torch.cuda.get_device_capability(device))) for device in devices}
    return tuple(sorted(archs)) if archs <= toolchain.known_archs(toolkit) else ()


def _compile_failed(folder: Path, compiler: str, output: str) -> BuildFailed:
    """The failure that quotes the compiler's first error; the whole output is kept in the cache folder."""
    log = folder / "build.log"
    log.write_text(output, encoding="utf-8")
    lines = output.splitlines()
    first = next((i for i, line in enumerate(lines) if "error" in line.lower() and i > 0), max(0, len(lines) - 12))
    quoted = "\n".join(f"    {line}" for line in lines[first : first + 12])
    return BuildFailed(f"{compiler} failed:\n{quoted}", f"The compiler's whole output is in {log}.")


def _spec() -> Spec:
    try:
        return read_spec(find_csrc())
    except FileNotFoundError as error:
        raise BuildFailed(str(error), "Run: pip install --force-reinstall --no-deps nanscan.") from error


def _key(spec: Spec, *parts: str) -> str:
    text = "\0".join([source_hash(spec.csrc), *parts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _import_file(path: Path) -> ModuleType:
    """Import the module ``nanscan._C`` from the cache."""
    loader_spec = importlib.util.spec_from_file_location(NATIVE_NAME, path)
    try:
        if loader_spec is None or loader_spec.loader is None:
            raise ImportError(f"Python takes no extension module of the name {path.name}")
        module = importlib.util.module_from_spec(loader_spec)
        loader_spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildFailed(
            f"{path} can't be imported: {error}.", f"Delete {path.parent}, to have it built again."
        ) from error
    sys.modules[NATIVE_NAME] = module
    return module


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for the duration of a build: PyTorch's loader takes compiler and ninja from the environment."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
