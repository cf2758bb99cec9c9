"""Compiles nanscan._C and, where a CUDA toolkit is found, nanscan/_cuda.so. All the rest is in pyproject.toml."""

import json
import shutil
import sys
import types
from importlib import import_module
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
for name in ("nanscan", "nanscan.engine"):  # without running their __init__: it needs torch, an isolated build has none
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(ROOT.joinpath(*name.split(".")))]
config = import_module("nanscan.config").load_config()
sources, toolchain = (import_module(f"nanscan.engine.{name}") for name in ("sources", "toolchain"))
spec = sources.read_spec(ROOT / "csrc")
cuda = toolchain.search_cuda()


def extensions():
    """The CPU module and, with a toolkit, the CUDA library: optional, unless the environment insists on them."""
    files = {"depends": [str(path.relative_to(ROOT)) for path in spec.csrc.iterdir()]}
    flags = {"extra_compile_args": list(spec.cpp.flags), "extra_link_args": list(spec.cpp.link_flags)}
    units, kernels = ([f"csrc/{source}" for source in part.sources] for part in (spec.cpp, spec.cuda))
    yield Pybind11Extension("nanscan._C", units, optional=config.engine != "native", **files, **flags)
    if config.cuda == "1" or (config.cuda == "auto" and cuda.toolkit):
        yield Extension("nanscan._cuda", kernels, optional=config.cuda != "1")


class BuildExt(build_ext):
    """Builds with nvcc too, and notes what came of it for `nanscan env`: pip hides what a build prints."""

    def run(self):
        no_cuda = f"Not built while installing, NANSCAN_CUDA={config.cuda}. {' '.join(cuda.tried)}"
        self.note = {"source_hash": sources.source_hash(spec.csrc), "cuda": no_cuda}
        super().run()
        record = Path(ROOT if self.inplace else self.build_lib, "nanscan", "_build.json")
        record.write_text(json.dumps(self.note, indent=1) + "\n", encoding="utf-8")

    def get_ext_filename(self, fullname):
        name = super().get_ext_filename(fullname)
        return str(Path(name).with_name(spec.cuda.file_name)) if Path(name).name.startswith("_cuda.") else name

    def build_extension(self, ext):
        part, build = ("cuda", self.build_cuda) if ext.name == "nanscan._cuda" else ("cpp", super().build_extension)
        try:
            build(ext)
            self.note[part] = "built"
        except Exception as error:
            self.note[part] = f"failed while installing: {error}"
            print(f"\n{'*' * 80}\n{ext.name} was NOT built: {error}\n{'*' * 80}\n", file=sys.stderr)
            raise CompileError(f"{ext.name}: {error}") from error

    def build_cuda(self, ext):
        if cuda.toolkit is None:
            raise CompileError(f"NANSCAN_CUDA=1, but there is no CUDA toolkit. {' '.join(cuda.tried)}")
        output = Path(self.get_ext_fullpath(ext.name))
        self.mkpath(str(output.parent))
        toolchain.run_nvcc(toolchain.nvcc_command(cuda.toolkit, spec, output, config.cuda_archs))


class BuildPy(build_py):
    """Puts the sources into the wheel: they are compiled on first use where the binary does not fit."""

    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.rmtree(target := Path(self.build_lib, "nanscan", "csrc"), ignore_errors=True)
            shutil.copytree(spec.csrc, target)


ParallelCompile(default=0).install()
setup(ext_modules=list(extensions()), cmdclass={"build_ext": BuildExt, "build_py": BuildPy})
