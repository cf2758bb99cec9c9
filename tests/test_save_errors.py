"""What the system refuses: one clear error with its number, nothing left behind, the old file as it was."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import nanscan
from nanscan.checkpoint import system

SMALL = {"w": torch.ones(10)}


def refusal(path: object, state: object = None) -> nanscan.CheckpointSystemError:
    with pytest.raises(nanscan.CheckpointSystemError) as caught:
        nanscan.save(SMALL if state is None else state, path)  # type: ignore[arg-type]
    assert isinstance(caught.value, OSError) and isinstance(caught.value, nanscan.CheckpointError)
    assert caught.value.filename == str(path) and repr(str(path)) in str(caught.value)
    return caught.value


def test_a_directory(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for path in (tmp_path / "runs", f"{tmp_path}/runs/", f"{tmp_path}/new/"):
        error = refusal(path)
        assert error.errno == errno.EISDIR and "is a directory: add a file name" in str(error)
    assert os.listdir(tmp_path) == ["runs"] and os.listdir(tmp_path / "runs") == []


def test_a_part_of_the_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "a.pt", tmp_path / "file" / "b" / "a.pt"):
        error = refusal(path)
        assert error.errno == errno.ENOTDIR and "a part of the path is a file" in str(error)


@pytest.mark.parametrize("name", ["n" * 300 + ".pt", "ü" * 130 + ".pt"])
def test_a_name_that_is_too_long(tmp_path: Path, name: str) -> None:
    error = refusal(tmp_path / name)
    assert error.errno == errno.ENAMETOOLONG and "255 bytes" in str(error)
    assert os.listdir(tmp_path) == []


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.pt").symlink_to("b.pt")
    (tmp_path / "b.pt").symlink_to("a.pt")
    assert refusal(tmp_path / "a.pt").errno == errno.ELOOP


def test_a_file_that_is_protected_against_writing(tmp_path: Path) -> None:
    path = nanscan.save(SMALL, tmp_path / "final.pt")
    path.chmod(0o444)
    error = refusal(path)
    assert error.errno == errno.EACCES and "make it writable" in str(error) and "is untouched" in str(error)
    assert nanscan.load(path)["w"].sum() == 10 and stat.S_IMODE(path.stat().st_mode) == 0o444


def test_pipes_devices_and_full_devices_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    for path in (tmp_path / "pipe.pt", "/dev/null"):
        assert "device, pipe or socket" in str(refusal(path))
        with pytest.raises(nanscan.CheckpointSystemError, match="device, pipe or socket"):
            nanscan.load(path)
    error = refusal("/dev/full")
    assert error.errno == errno.ENOSPC and "No space left on device" in str(error)


@pytest.mark.parametrize("path", ["", "a\0b.pt"])
def test_what_is_no_path(path: str) -> None:
    assert "empty or holds a null character" in str(refusal(path))


def test_a_file_object_is_refused_with_what_to_use(tmp_path: Path) -> None:
    with open(tmp_path / "a.pt", "wb") as file, pytest.raises(TypeError, match="str or pathlib.Path.*torch.save"):
        nanscan.save(SMALL, file)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EDQUOT, "quota is exceeded"), (errno.EROFS, "file system is read-only"),
        (errno.EACCES, "permission denied"), (errno.ENOSPC, "No space left on device"),
        (errno.EIO, "input/output error"), (errno.EMFILE, "ulimit -n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_every_refusal_is_one_error_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str, call: str
) -> None:
    path = nanscan.save(SMALL, tmp_path / "last.pt")
    real: Callable[..., object] = getattr(os, call)

    def refuse(first: object, *rest: object, **more: object) -> object:
        if call == "open" and not str(first).endswith(".tmp"):
            return real(first, *rest, **more)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    error = refusal(path, {"w": torch.zeros(500_000)})
    monkeypatch.undo()
    assert error.errno == number and words in str(error) and "The file that was there is untouched" in str(error)
    assert os.listdir(tmp_path) == ["last.pt"] and nanscan.load(path)["w"].sum() == 10


def test_a_full_disk_is_told_with_needed_and_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    error = refusal(tmp_path / "last.pt", {"w": torch.zeros(500_000), "same": torch.zeros(1)})
    found = re.search(r"\(([\d,]+) bytes needed, ([\d,]+) bytes free\)", str(error))
    assert found is not None
    assert 2_000_004 <= int(found[1].replace(",", "")) <= 2_020_000
    assert int(found[2].replace(",", "")) > 0


def limited(tmp_path: Path, name: str, action: str) -> str:
    """Save a small and then a large state in a process that may not write files beyond 20,000 bytes."""
    script = f"""
        import os, resource, signal, torch, nanscan
        path = {str(tmp_path / name)!r}
        nanscan.save({{"w": torch.ones(10)}}, path)
        signal.signal(signal.SIGXFSZ, {action})
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        for numel in (100_000, 10_000, 1_000_000):
            try:
                nanscan.save({{"w": torch.ones(numel)}}, path)
            except nanscan.CheckpointSystemError as error:
                print(error.errno, error)
        nanscan.save({{"w": torch.ones(20)}}, path)
        print(nanscan.load(path)["w"].sum().item(), os.listdir(os.path.dirname(path)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("a.pt", "signal.SIG_DFL"), ("a.pt", "signal.SIG_IGN"), ("a.safetensors", "signal.SIG_DFL"),
        ("a.h5", "signal.SIG_DFL"),
    ],
)  # fmt: skip
def test_the_limit_on_file_sizes_ends_neither_the_process_nor_the_old_file(
    tmp_path: Path, name: str, action: str
) -> None:
    lines = limited(tmp_path, name, action).splitlines()
    assert len(lines) == 4, lines
    for line in lines[:3]:
        assert line.startswith(f"{errno.EFBIG} ") and "limit 20,000 bytes, ulimit -f" in line and "untouched" in line
    assert lines[3] == f"20.0 ['{name}']"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert refusal(tmp_path / "a.pt").errno == errno.EACCES


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ESTALE, "check its mount"), (errno.ENOTCONN, "check its mount"), (errno.EBUSY, "mounted by itself")],
)
def test_a_rename_that_a_mounted_file_system_refuses_says_what_to_do_and_leaves_the_old_file(
    number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    nanscan.save({"step": 1}, tmp_path / "a.pt")
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(nanscan.CheckpointError, match=words) as caught:
        nanscan.save({"step": 2}, tmp_path / "a.pt")
    assert isinstance(caught.value, OSError) and caught.value.errno == number
    assert os.listdir(tmp_path) == ["a.pt"] and nanscan.load(tmp_path / "a.pt")["step"] == 1


def test_of_thousands_of_one_kind_the_first_the_last_and_their_number_are_told(tmp_path: Path) -> None:
    state = {"losses": [np.float64(i) for i in range(500)], "out": Path("runs"), "w": torch.ones(2)}
    with pytest.raises(nanscan.CheckpointError) as caught:
        nanscan.save(state, tmp_path / "a.pt")
    said = str(caught.value)
    assert said.count("\n") == 3 and "501 value(s)" in said and 'state["losses"][0] (numpy.float64)' in said
    assert 'and 499 more numpy.float64, the last at state["losses"][499]: store float(x)' in said
    assert 'state["out"] (pathlib.PosixPath)' in said
    with pytest.warns(nanscan.CheckpointWarning, match="and 499 more") as warned:
        nanscan.save(state, tmp_path / "a.pt", on_unpicklable="drop")
    assert str(warned[0].message).count("\n") == 3 and list(nanscan.load(tmp_path / "a.pt")) == ["losses", "w"]


def test_an_unknown_number_keeps_the_systems_own_words() -> None:
    error = system.refused(OSError(errno.ENOTRECOVERABLE, "State not recoverable"), "a.pt", "save")
    assert error.errno == errno.ENOTRECOVERABLE and str(error) == "cannot save 'a.pt': state not recoverable"


@pytest.mark.parametrize("path", ["x.pt", Path("x.pt")])
def test_swapped_arguments_are_told_the_right_order(path: str | Path) -> None:
    with pytest.raises(TypeError, match=r"the other way round: nanscan.save\(dict, 'x.pt'\)"):
        nanscan.save(path, {"w": torch.ones(1)})  # type: ignore[arg-type]
