"""The binary structures of DLPack, as csrc declares them, are those of the PyTorch that is installed."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from nanscan.engine.toolchain import find_cxx

CSRC = Path(__file__).resolve().parent.parent / "csrc"
TORCH_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "dlpack.h"

STRUCTS = {
    "Version=DLPackVersion": ["major", "minor"],
    "Device=DLDevice": ["device_type", "device_id"],
    "DataType=DLDataType": ["code", "bits", "lanes"],
    "Tensor=DLTensor": ["data", "device", "ndim", "dtype", "shape", "strides", "byte_offset"],
    "ExchangeHeader=DLPackExchangeAPIHeader": ["version", "prev_api"],
    "ExchangeApi=DLPackExchangeAPI": [
        "header",
        "managed_tensor_allocator",
        "managed_tensor_from_py_object_no_sync",
        "managed_tensor_to_py_object_no_sync",
        "dltensor_from_py_object_no_sync",
        "current_work_stream",
    ],
}
CONSTANTS = ["kDLCPU", "kDLCUDA", "kDLCUDAHost", "kDLROCM", "kDLCUDAManaged"]
CONSTANTS += ["kDLInt", "kDLUInt", "kDLFloat", "kDLBfloat", "kDLComplex", "kDLBool"]
CONSTANTS += ["kDLFloat8_e4m3fn", "kDLFloat8_e5m2"]


def comparison() -> str:
    """A C++ file that compiles only if both headers say the same."""
    lines = [
        "#include <cstddef>",
        "#include <cstdint>",
        "#include <type_traits>",
        '#include "dlpack_abi.h"',
        f'namespace theirs {{\n#include "{TORCH_HEADER}"\n}}',
        "namespace ours = nanscan::dlpack;",
    ]
    for pair, fields in STRUCTS.items():
        our, their = pair.split("=")
        lines.append(f'static_assert(sizeof(ours::{our}) == sizeof(theirs::{their}), "size of {our}");')
        lines.append(f'static_assert(alignof(ours::{our}) == alignof(theirs::{their}), "alignment of {our}");')
        for name in fields:
            lines.append(
                f"static_assert(offsetof(ours::{our}, {name}) == offsetof(theirs::{their}, {name}) && "
                f'sizeof(ours::{our}::{name}) == sizeof(theirs::{their}::{name}), "{our}.{name}");'
            )
    for name in CONSTANTS:
        lines.append(f'static_assert((int)ours::{name} == (int)theirs::{name}, "{name}");')
    lines.append('static_assert(ours::kMajorVersion == DLPACK_MAJOR_VERSION, "major version");')
    return "\n".join(lines) + "\n"


def compile_with(header: str) -> subprocess.CompletedProcess[str]:
    """Compile the comparison with ``header`` in the place of csrc/dlpack_abi.h."""
    compiler = find_cxx()
    if compiler is None:
        pytest.skip("no C++ compiler here")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "dlpack_abi.h").write_text(header)
        Path(folder, "compare.cpp").write_text(comparison())
        command = [*compiler.command.split(), "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", "compare.cpp"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_structures_have_pytorchs_sizes_offsets_and_codes() -> None:
    done = compile_with((CSRC / "dlpack_abi.h").read_text())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("int32_t ndim;", "int64_t ndim;", "Tensor.ndim"),
        ("kDLFloat8_e5m2 = 12", "kDLFloat8_e5m2 = 13", "kDLFloat8_e5m2"),
        ("void* managed_tensor_allocator;", "", "managed_tensor_allocator"),
    ],
)
def test_a_structure_that_differs_is_found(right: str, wrong: str, said: str) -> None:
    header = (CSRC / "dlpack_abi.h").read_text()
    assert header.count(right) == 1
    done = compile_with(header.replace(right, wrong))
    assert done.returncode != 0
    assert said in done.stderr


def test_pytorch_hands_out_the_table_under_the_name_and_version_that_csrc_reads() -> None:
    import ctypes

    capsule = type(torch.zeros(1)).__dlpack_c_exchange_api__  # type: ignore[attr-defined]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dlpack_exchange_api")
    assert ctypes.cast(address, ctypes.POINTER(ctypes.c_uint32))[0] == 1
    assert '"dlpack_exchange_api"' in (CSRC / "dlpack_abi.h").read_text()
