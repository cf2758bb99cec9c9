"""Checks all of the CUDA engine that can be checked without a GPU; ``make cuda`` runs it.

1. Compiles it for every GPU architecture that the toolkit knows, reads what ptxas says of each kernel, prints the
   registers as a table and insists that nothing is spilled and no kernel needs a stack frame.
2. Loads the library on this machine and asks it things: without a driver it has to answer in words, not to crash.
3. In an environment with a CUDA build of PyTorch (``--torch-python``): imports nanscan, builds and loads the CUDA
   engine as a first scan would, and sees that CPU tensors are scanned all the same.

Exit status 0: all well; 1: something is not, named on the last lines; 2: there is no toolkit.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanscan.engine import toolchain
from nanscan.engine.sources import find_csrc, read_spec

ROOT = Path(__file__).resolve().parent.parent
KERNELS = {  # what ptxas must report, by a part of the mangled name, and the registers a kernel may use at most
    "scan_kernel, 4 KB of parameters": (r"scan_kernel.*Li4096E", 64),  # 64: two blocks of 512 threads fit together
    "scan_kernel, 32 KB of parameters": (r"scan_kernel.*Li32764E", 64),
    "clear_kernel": (r"clear_kernel", 64),
}


@dataclass(frozen=True)
class KernelUse:
    """What ptxas says of one kernel on one architecture."""

    kernel: str  # mangled name
    arch: str  # such as "90"
    stack: int  # bytes
    spill_stores: int  # bytes
    spill_loads: int  # bytes
    registers: int


def compile_library(toolkit: toolchain.CudaToolkit, output: Path, archs: Sequence[str] = ()) -> list[KernelUse]:
    """Compile the library as an installation does, for ``archs`` (default: all), and read ptxas's report.

    Raises:
        RuntimeError: the compiler failed; the message is its output.
    """
    command = toolchain.nvcc_command(toolkit, read_spec(find_csrc()), output, archs)
    return parse_ptxas(toolchain.run_nvcc([*command, "-Xptxas", "-v"]))


def parse_ptxas(text: str) -> list[KernelUse]:
    """The kernels in the output of ``ptxas -v``."""
    entry = re.compile(
        r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    return [
        KernelUse(name, arch, int(stack), int(stores), int(loads), int(registers))
        for name, arch, stack, stores, loads, registers in entry.findall(text)
    ]


def find_use(uses: Sequence[KernelUse], pattern: str, arch: str) -> KernelUse | None:
    return next((use for use in uses if use.arch == arch and re.search(pattern, use.kernel)), None)


def kernel_problems(uses: Sequence[KernelUse], archs: Sequence[str]) -> list[str]:
    """One sentence for each kernel that is missing, spills, needs a stack frame or uses too many registers."""
    problems = []
    for title, (pattern, most) in KERNELS.items():
        for arch in archs:
            use = find_use(uses, pattern, arch)
            if use is None:
                problems.append(f"{title}: ptxas reports none for sm_{arch}.")
            elif use.stack or use.spill_stores or use.spill_loads:
                spills = f"{use.stack} bytes of stack, {use.spill_stores} + {use.spill_loads} bytes of spills"
                problems.append(f"{title} on sm_{arch}: {spills}.")
            elif use.registers > most:
                problems.append(f"{title} on sm_{arch}: {use.registers} registers, more than {most}.")
    return problems


def register_table(uses: Sequence[KernelUse], archs: Sequence[str]) -> str:
    """Registers per thread, a line for each kernel and a column for each architecture."""
    lines = [f"{'registers per thread':<34}" + "".join(f"{'sm_' + arch:>8}" for arch in archs)]
    for title, (pattern, _) in KERNELS.items():
        found = [find_use(uses, pattern, arch) for arch in archs]
        lines.append(f"{title:<34}" + "".join(f"{'-' if use is None else use.registers:>8}" for use in found))
    return "\n".join(lines)


class Api(ctypes.Structure):
    """``nanscan::cuda::Api`` (csrc/scan_cuda.h), as far as it can be used without a GPU."""

    _fields_ = [
        ("abi_version", ctypes.c_uint32),
        ("struct_bytes", ctypes.c_uint32),
        ("build", ctypes.c_char_p),
        ("device_count", ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p, ctypes.c_int64)),
        ("workspace_bytes", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)),
        ("output_bytes", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)),
        ("prepare", ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int64)),
        ("launch", ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64)),
        ("clear_if", ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64)),
    ]


class Tensor(ctypes.Structure):
    """``nanscan::cuda::Tensor``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class Scan(ctypes.Structure):
    """``nanscan::cuda::Scan``."""

    _fields_ = [
        ("tensors", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("norm_count", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("output_bytes", ctypes.c_int64),
        ("grad_scale", ctypes.c_void_p),
        ("found_inf", ctypes.c_void_p),
        ("clip_norm", ctypes.c_double),
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


def load_api(library: Path) -> Api:
    """The table of functions of a built library.

    Raises:
        OSError: it can't be loaded, or is not that library.
    """
    try:
        get = ctypes.CDLL(str(library)).nanscan_cuda_api
    except AttributeError as error:
        raise OSError(f"{library} has no nanscan_cuda_api") from error
    get.restype = ctypes.POINTER(Api)
    api: Api = get().contents
    return api


def launch_error(api: Api, **fields: object) -> tuple[int, str]:
    """Result and text of a launch on one float32 tensor whose pointers are made up: it must never get to the device."""
    tensor = Tensor(1 << 20, 1000, 0, 0)
    scan = Scan(ctypes.addressof(tensor), 1, 1, 1 << 20, 1 << 20, 1 << 20, 1 << 20, clip_norm=1.0)
    for name, value in fields.items():
        setattr(scan, name, value)
    text = ctypes.create_string_buffer(500)
    code = api.launch(ctypes.addressof(scan), text, len(text))
    return code, text.value.decode()


def api_problems(api: Api) -> list[str]:
    """One sentence for each answer of the library that is not as it should be on a machine without a GPU."""
    problems = []
    if ctypes.sizeof(Api) != api.struct_bytes:
        problems.append(f"the table of functions has {api.struct_bytes} bytes, not {ctypes.sizeof(Api)}.")
    large = Tensor(1 << 20, (1 << 33) + 5, 0, 0)
    chunks = -(-large.numel // 2048)
    if (
        api.workspace_bytes(ctypes.addressof(large), 1) != 64 + -(-chunks // 16) * 48
        or api.output_bytes(3) != 64 + 3 * 48
    ):
        problems.append("the sizes of workspace and output are not those of csrc/scan_cuda.h.")
    text = ctypes.create_string_buffer(500)
    devices = api.device_count(text, len(text))
    if devices < 0 and not text.value.startswith(b"no CUDA device: "):
        problems.append(f"device_count says {text.value!r} instead of why there is no device.")
    wrong = {
        "clip_norm is -1; it must be positive": {"clip_norm": -1.0},
        "a workspace of 64 bytes at 0x100000: it must have 112 bytes, aligned to 16": {"workspace_bytes": 64},
        "an output of 64 bytes at 0x100000: it must have 112 bytes, aligned to 16": {"output_bytes": 64},
        "norm_count is 2 of 1 tensors": {"norm_count": 2},
    }
    for expected, fields in wrong.items():
        code, said = launch_error(api, **fields)
        if code != -1 or said != expected:
            problems.append(f"a wrong argument is answered by {code}, {said!r} instead of {expected!r}.")
    if devices < 0:
        code, said = launch_error(api)
        if code <= 0 or not said.startswith("selecting it on CUDA device 0 failed: "):
            problems.append(f"a launch without a device is answered by {code}, {said!r}.")
    return problems


TORCH_CHECK = """
import sys, torch
if torch.version.cuda is None:
    sys.exit(77)
import nanscan
from nanscan.engine.build import load_cuda_library, load_native
native = load_native(required=True)
native.load_cuda(str(load_cuda_library(required=True)))
report = nanscan.scan([torch.tensor([3.0, float("nan"), 4.0])])
assert (report.nan_count, report.finite_norm) == (1, 5.0), report
print(f"torch {torch.__version__}, {'a' if torch.cuda.is_available() else 'no'} GPU: the CUDA engine is loaded")
print(nanscan.engine_info())
"""


def torch_problems(python: Path, arch: str) -> list[str]:
    """Import nanscan beside a CUDA build of PyTorch; build, load and fall back there. Prints what it found."""
    with tempfile.TemporaryDirectory() as cache:
        settings = {"PYTHONPATH": str(ROOT), "NANSCAN_CACHE_DIR": cache, "NANSCAN_CUDA_ARCHS": arch}
        env = {**os.environ, **settings}
        done = subprocess.run([str(python), "-c", TORCH_CHECK], env=env, cwd=cache, capture_output=True, text=True)
    if done.returncode == 77:
        print(f"SKIPPED: the PyTorch of {python} is built without CUDA; --torch-python names another.")
        return []
    print(done.stdout)
    return [f"{python}: exit status {done.returncode}\n{done.stderr[-3000:]}"] if done.returncode else []


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    beside = ROOT / ".venv-cuda" / "bin" / "python"
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--archs", nargs="*", default=[], help="compute capabilities such as 90 (default: all)")
    parser.add_argument(
        "--torch-python",
        type=Path,
        default=beside if beside.exists() else Path(sys.executable),
        help="the Python of an environment with a CUDA build of PyTorch (default: %(default)s)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    search = toolchain.search_cuda()
    if search.toolkit is None:
        print(f"No CUDA toolkit. {' '.join(search.tried)}", file=sys.stderr)
        return 2
    archs = sorted(options.archs or toolchain.known_archs(search.toolkit), key=int)
    print(f"{search.toolkit}: compiling for {', '.join('sm_' + arch for arch in archs)}")
    with tempfile.TemporaryDirectory() as folder:
        library, start = Path(folder) / "_cuda.so", time.monotonic()
        uses = compile_library(search.toolkit, library, archs)
        print(f"compiled in {time.monotonic() - start:.0f} s, {library.stat().st_size / 1e6:.1f} MB\n")
        print(register_table(uses, archs), "\n", sep="")
        api = load_api(library)
        print(f"the library loads here: {api.build.decode()}\n")
        problems = kernel_problems(uses, archs) + api_problems(api)
        problems += torch_problems(options.torch_python, archs[-1])
    print(*problems, sep="\n")
    print("FAILED" if problems else "ok: no spills, no stack frames, loads and answers without a GPU")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
