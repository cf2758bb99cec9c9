"""Compilers and CUDA toolkits are found where they are, by the documented order, on machines made of fake scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nanscan.engine.sources import CppSpec, CudaSpec, Spec
from nanscan.engine.toolchain import (
    CudaToolkit,
    find_cuda,
    find_cxx,
    find_ninja,
    known_archs,
    nvcc_command,
    run_nvcc,
    search_cuda,
)

SHELL = "/usr/bin:/bin"  # what the fake scripts themselves need


def script(path: Path, body: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def toolkit(root: Path, version: str = "13.0", without: str = "", lib: str = "lib64") -> Path:
    """A folder that looks like a CUDA toolkit and answers like one; returns its nvcc."""
    for name in ("include/cuda_runtime.h", f"{lib}/libcudart_static.a"):
        if without != Path(name).name:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
    body = f"""case "$1" in
--version) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
--dryrun) echo '#$ _HERE_={root}/bin' >&2; echo '#$ TOP={root}/bin/..' >&2 ;;
--list-gpu-code) echo sm_75; echo sm_90; echo sm_90a ;;
*) exit 1 ;;
esac"""
    return script(root / "bin" / "nvcc", body)


def search(path: str = "", sites: tuple[Path, ...] = (), **variables: str) -> CudaToolkit | None:
    return search_cuda({"PATH": f"{path}:{SHELL}" if path else "/nowhere", **variables}, sites).toolkit


def test_cuda_home_comes_before_pip_and_pip_before_path(tmp_path: Path) -> None:
    home, site, on_path = tmp_path / "home", tmp_path / "site", tmp_path / "path"
    toolkit(home, "12.8")
    toolkit(site / "nvidia" / "cu13", "13.1", lib="lib")
    toolkit(on_path, "13.0")
    path = str(on_path / "bin")

    by_home = search(path, (site,), CUDA_HOME=str(home))
    assert by_home is not None
    assert (by_home.root, by_home.found_by, by_home.version) == (home, "CUDA_HOME", "12.8")
    by_pip = search(path, (site,))
    assert by_pip is not None
    assert (by_pip.root, by_pip.found_by, by_pip.version) == (site / "nvidia" / "cu13", "pip", "13.1")
    assert by_pip.lib_dirs == (site / "nvidia" / "cu13" / "lib",)
    by_path = search(path)
    assert by_path is not None
    assert (by_path.root, by_path.found_by, by_path.version) == (on_path, "PATH", "13.0")


def test_cuda_path_serves_where_cuda_home_is_not_set(tmp_path: Path) -> None:
    toolkit(tmp_path)
    found = search(CUDA_PATH=str(tmp_path))
    assert found is not None
    assert found.found_by == "CUDA_PATH"


def test_a_wrapper_on_path_resolves_to_the_toolkit_that_it_execs(tmp_path: Path) -> None:
    real = toolkit(tmp_path / "opt" / "cuda")
    script(tmp_path / "usr" / "bin" / "nvcc", f'exec {real} "$@"')
    found = search(str(tmp_path / "usr" / "bin"))
    assert found is not None
    assert (found.root, found.nvcc) == (tmp_path / "opt" / "cuda", real)
    assert found.include_dirs == (tmp_path / "opt" / "cuda" / "include",)


def test_a_wrapper_of_a_wrapper_with_variables_resolves_too(tmp_path: Path) -> None:
    real = toolkit(tmp_path / "opt" / "cuda")
    inner = script(tmp_path / "inner" / "nvcc", f'WHERE={real.parent}\nexec "$WHERE/nvcc" "$@"')
    script(tmp_path / "outer" / "nvcc", f'{inner} "$@"')
    found = search(str(tmp_path / "outer"))
    assert found is not None
    assert found.root == tmp_path / "opt" / "cuda"


def test_a_link_on_path_resolves_to_the_toolkit_that_it_points_to(tmp_path: Path) -> None:
    real = toolkit(tmp_path / "cuda-13.0")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(real)
    found = search(str(tmp_path / "bin"))
    assert found is not None
    assert found.root == tmp_path / "cuda-13.0"


def test_headers_and_libraries_below_targets_are_found(tmp_path: Path) -> None:
    nvcc = toolkit(tmp_path, without="cuda_runtime.h", lib="targets/x86_64-linux/lib")
    header = tmp_path / "targets" / "x86_64-linux" / "include" / "cuda_runtime.h"
    header.parent.mkdir()
    header.touch()
    found = search(str(nvcc.parent))
    assert found is not None
    assert (found.include_dirs, found.lib_dirs) == ((header.parent,), (tmp_path / "targets" / "x86_64-linux" / "lib",))


def test_the_static_runtime_may_come_from_the_runtime_package_of_the_same_major_version(tmp_path: Path) -> None:
    nvcc = toolkit(tmp_path / "cuda", without="libcudart_static.a")
    site = tmp_path / "site"
    for major in ("12", "13"):
        folder = site / "nvidia" / f"cu{major}" / "lib"
        folder.mkdir(parents=True)
        (folder / "libcudart_static.a").touch()
    found = search(str(nvcc.parent), (site,))
    assert found is not None
    assert found.lib_dirs == (site / "nvidia" / "cu13" / "lib",)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("cuda_runtime.h", "has no include/cuda_runtime.h."),
        ("libcudart_static.a", "has no libcudart_static.a, and no nvidia-cuda-runtime package has it."),
    ],
)
def test_half_a_toolkit_is_passed_over_and_said(missing: str, words: str, tmp_path: Path) -> None:
    toolkit(tmp_path / "half", without=missing)
    whole = toolkit(tmp_path / "whole")
    result = search_cuda({"CUDA_HOME": str(tmp_path / "half"), "PATH": f"{whole.parent}:{SHELL}"}, ())
    assert result.toolkit is not None
    assert result.toolkit.root == tmp_path / "whole"
    assert result.tried[0] == f"The toolkit at {tmp_path / 'half'} {words}"


def test_nothing_found_says_where_it_was_looked_for(tmp_path: Path) -> None:
    result = search_cuda({"CUDA_HOME": str(tmp_path), "PATH": str(tmp_path)}, (tmp_path,))
    assert result.toolkit is None
    assert result.tried == (
        f"CUDA_HOME={tmp_path} has no bin/nvcc.",
        "No nvidia/cu13/bin/nvcc in Python's site-packages.",
        "No nvcc on PATH.",
    )


def test_an_nvcc_that_does_not_run_is_not_a_toolkit(tmp_path: Path) -> None:
    toolkit(tmp_path)
    script(tmp_path / "bin" / "nvcc", "exit 3")
    result = search_cuda({"PATH": f"{tmp_path / 'bin'}:{SHELL}"}, ())
    assert result.toolkit is None
    assert result.tried[-1] == f"{tmp_path / 'bin' / 'nvcc'} does not run, or does not say which toolkit it belongs to."


def test_the_active_virtual_environment_is_looked_into(tmp_path: Path) -> None:
    site = tmp_path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    toolkit(site / "nvidia" / "cu13", lib="lib")
    found = search_cuda({"PATH": "/nowhere", "VIRTUAL_ENV": str(tmp_path)}).toolkit
    assert found is not None
    assert found.root == site / "nvidia" / "cu13"


def test_the_toolkit_of_this_machine_is_whole() -> None:
    found = find_cuda()
    if found is None:
        pytest.skip(f"no CUDA toolkit here: {search_cuda().tried}")
    assert (found.include_dirs[0] / "cuda_runtime.h").is_file()
    assert "90" in known_archs(found)


def test_cxx_comes_before_the_usual_names(tmp_path: Path) -> None:
    script(tmp_path / "c++", "echo usual 1")
    script(tmp_path / "mine", "echo mine 2")
    path = f"{tmp_path}:{SHELL}"
    usual, mine = find_cxx({"PATH": str(tmp_path)}), find_cxx({"PATH": path, "CXX": "mine -m64"})
    assert usual is not None
    assert str(usual) == f"{tmp_path}/c++ (usual 1)"
    assert mine is not None
    assert (mine.command, mine.version) == (f"{tmp_path}/mine -m64", "mine 2")


def test_a_compiler_that_is_not_there_is_none(tmp_path: Path) -> None:
    script(tmp_path / "c++", "echo usual 1")
    assert find_cxx({"PATH": "/nowhere"}) is None
    assert find_cxx({"PATH": str(tmp_path), "CXX": "absent"}) is None


def test_ninja_is_found_on_path_first(tmp_path: Path) -> None:
    ninja = script(tmp_path / "ninja", "echo 1")
    assert find_ninja({"PATH": str(tmp_path)}) == str(ninja)


@pytest.mark.parametrize(
    ("archs", "flags"),
    [
        ((), ["-arch=all"]),
        (
            ("90", "120"),
            [
                "-gencode=arch=compute_90,code=sm_90",
                "-gencode=arch=compute_120,code=sm_120",
                "-gencode=arch=compute_120,code=compute_120",
            ],
        ),
    ],
)
def test_the_nvcc_command_names_every_part(archs: tuple[str, ...], flags: list[str], tmp_path: Path) -> None:
    nvcc = toolkit(tmp_path)
    found = search(str(nvcc.parent))
    assert found is not None
    spec = Spec(Path("/src"), CppSpec((), (), ()), CudaSpec(("a.cu",), ("-O3",), "_cuda.so"))
    command = nvcc_command(found, spec, Path("/out/_cuda.so"), archs, {"CXX": "g++-12"})
    linked = ["-shared", "-cudart", "static", "-Xcompiler", "-fPIC", f"-L{tmp_path}/lib64"]
    includes = ["-I/src", f"-I{tmp_path}/include"]
    host = ["-ccbin", "g++-12"]
    assert command == [str(nvcc), "-O3", *flags, *host, *includes, *linked, "/src/a.cu", "-o", "/out/_cuda.so"]


def test_a_failing_nvcc_is_quoted_with_its_command(tmp_path: Path) -> None:
    bad = script(tmp_path / "nvcc", "echo 'scan.cu(3): error: no such thing'; exit 2")
    with pytest.raises(RuntimeError, match=r"exit status 2: .*/nvcc -x\nscan.cu\(3\): error: no such thing"):
        run_nvcc([str(bad), "-x"])
    with pytest.raises(RuntimeError, match="can't be run"):
        run_nvcc([str(tmp_path / "absent")])
