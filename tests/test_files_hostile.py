"""Files made to harm their reader, and damaged ones: a clear error, no code run, no memory lost, no hang."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import struct
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch

from nanscan.cli import main
from nanscan.files.scan import scan_file

NAN = float("nan")


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """No file here may keep its reader busy."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < 60


def torch_zip(path: Path, data_pkl: bytes, storages: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", data_pkl)
        for key, data in (storages or {}).items():
            archive.writestr(f"a/data/{key}", data)
    return path


def number(n: int) -> bytes:
    return b"L%dL\n" % n


def tensor_pickle(shape: list[int], stride: list[int], offset: int, numel: int) -> bytes:
    """The pickle of `{"w": tensor}` whose storage claims `numel` float32."""
    sizes, strides = (b"(" + b"".join(map(number, part)) + b"t" for part in (shape, stride))
    storage = b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\n" + number(numel) + b"tQ"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + sizes + strides + b"\x89NtR"
    return b"\x80\x02}(Vw\n" + call + b"u."


def error_of(path: Path) -> str:
    result = scan_file(path)
    assert result.error is not None and not result.misuse
    return result.error


@pytest.mark.parametrize(
    ("shape", "stride", "offset", "numel", "words"),
    [
        ([3], [1], 0, 2, "reaches to byte 12 of a storage of 8 bytes"),
        ([2], [1], 1, 2, "reaches to byte 12 of a storage of 8 bytes"),
        ([2], [-1], 1, 2, "a size, stride or offset of a tensor is -4"),
        ([2], [1], -1, 2, "a size, stride or offset of a tensor is -4"),
        ([-2], [1], 0, 2, "a size, stride or offset of a tensor is -2"),
        ([2**40, 2**40], [1, 1], 0, 2, "more than memory can address"),
        ([2], [1, 1], 0, 2, "1 sizes and 2 strides"),
        ([2], [1], 0, 2**50, "should hold 1125899906842624 elements of float32, but has 8 bytes"),
        ([1] * 100, [1] * 100, 0, 2, "100 sizes"),
    ],
)
def test_a_view_beyond_its_storage_is_an_error_with_sizes(
    tmp_path: Path, shape: list[int], stride: list[int], offset: int, numel: int, words: str
) -> None:
    path = torch_zip(tmp_path / "x.pt", tensor_pickle(shape, stride, offset, numel), {"0": bytes(8)})
    assert words in error_of(path)


def test_an_expanded_tensor_of_any_size_is_scanned_at_once(tmp_path: Path) -> None:
    data = struct.pack("<2f", NAN, 1)
    path = torch_zip(tmp_path / "x.pt", tensor_pickle([2**20, 2**40], [0, 0], 0, 2), {"0": data})
    (row,) = scan_file(path).rows
    assert row.nan_count == 2**60


def test_views_that_read_a_storage_a_million_times_over_are_refused(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "x.pt", tensor_pickle([2**20, 2**16], [1, 1], 0, 2**21), {"0": bytes(2**23)})
    assert "far more than they hold" in error_of(path)


def test_a_missing_storage_is_named(tmp_path: Path) -> None:
    assert "'a/data/0' is missing" in error_of(torch_zip(tmp_path / "x.pt", tensor_pickle([2], [1], 0, 2)))


DAG = b"\x80\x02]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(200)) + b"."
HASHED = b"\x80\x02)q\x00" + b"".join(b"(h%ch%ctq%c" % (i, i, i + 1) for i in range(200)) + b"}h\xc8Ns."
PICKLES: dict[str, tuple[bytes, str | None]] = {
    "two to the 200 paths": (DAG, None),
    "a key that takes forever to hash": (HASHED, None),
    "a memo slot that would take 32 GB": (b"\x80\x02Nr\xff\xff\xff\xff.", None),
    "three million lists": (b"\x80\x02" + b"]" * 3_000_000 + b".", "more than 2000000 objects"),
    "nested 100,000 deep": (b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", "nested more than 500 deep"),
    "a number of 2 GB": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "a number of 2147483647 bytes"),
    "bytes beyond the end": (b"\x80\x04\x96" + struct.pack("<Q", 2**60) + b".", "cut off"),
    "a stack that is empty": (b"\x80\x02R.", "nothing is on its stack"),
    "no instruction": (b"\x80\x02\xff.", "0xff: no instruction"),
    "arrays elsewhere": (b"\x80\x05\x97.", "out-of-band"),
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_made_to_exhaust_its_reader_ends_quickly(tmp_path: Path, kind: str) -> None:
    data, words = PICKLES[kind]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = scan_file(torch_zip(tmp_path / "x.pt", data))
    assert (result.error is None) if words is None else (words in str(result.error))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700_000  # kB


class Canary:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


CANARIES: dict[str, Callable[[Any, Path], None]] = {
    "zip": lambda value, path: torch.save(value, path),
    "legacy": lambda value, path: torch.save(value, path, _use_new_zipfile_serialization=False),
    "pickle": lambda value, path: path.write_bytes(pickle.dumps(value)) and None,
    "npy": lambda value, path: np.save(path.open("wb"), np.array([value], dtype=object), allow_pickle=True),
}


@pytest.mark.parametrize("kind", CANARIES)
def test_code_in_a_file_is_named_and_not_run(tmp_path: Path, kind: str) -> None:
    CANARIES[kind]({"w": torch.tensor([NAN]), "evil": Canary(tmp_path / "run")}, tmp_path / "x.pt")
    result = scan_file(tmp_path / "x.pt")
    assert not (tmp_path / "run").exists()
    assert [row.nan_count for row in result.rows] == [1]
    assert result.notes == [f"loading it with pickle would call {os.mkdir.__module__}.mkdir; nothing was called here"]
    pickle.loads(pickle.dumps(Canary(tmp_path / "run")))
    assert (tmp_path / "run").exists()  # the canary does sing


def test_a_protocol_0_pickle_that_calls_the_shell_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % bytes(tmp_path / "run"))
    assert scan_file(tmp_path / "x.pkl").notes == [
        "loading it with pickle would call os.system; nothing was called here"
    ]
    assert not (tmp_path / "run").exists()


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS: dict[str, tuple[bytes, str]] = {
    "longer than the file": (struct.pack("<Q", 2**50) + b"{}", "claims 1125899906842624 bytes of a file of 10"),
    "nested": (safetensors_bytes(b'{"a":' + b"[" * 200_000), "nested too deep"),
    "nested objects": (safetensors_bytes(b'{"a":' + b'[{"a":' * 100_000), "not valid JSON"),
    "overlap": (safetensors_bytes({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(4)), "4 should follow"),
    "hole": (safetensors_bytes({"a": entry([1], 4, 8)}, bytes(8)), "lies at bytes 4 to 8, where 0 should follow"),
    "cut off": (safetensors_bytes({"a": entry([2], 0, 8)}, bytes(6)), "cut off"),
    "trailing": (safetensors_bytes({"a": entry([1], 0, 4)}, bytes(6)), "followed by other bytes"),
    "wrong shape": (safetensors_bytes({"a": entry([3], 0, 4)}, bytes(4)), "does not fill its 4 bytes"),
    "negative": (safetensors_bytes({"a": entry([-1, -1], 0, 4)}, bytes(4)), "is -1"),
    "unknown type": (safetensors_bytes({"a": entry([1], 0, 4, "F33")}, bytes(4)), "unknown type 'F33'"),
    "twice": (safetensors_bytes(b'{"a":1,"a":2}'), "a name occurs twice"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_wrong_safetensors_header_is_an_error(tmp_path: Path, kind: str) -> None:
    data, words = HEADERS[kind]
    (tmp_path / "x.safetensors").write_bytes(data)
    assert words in error_of(tmp_path / "x.safetensors")


def npy(descr: str, shape: str) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (npy("'<f4'", "(2**40,)"), "cannot be read"),
        (npy("'<f4'", "(1099511627776,)"), "reaches to byte"),
        (npy("'<f4'", "(-1,)"), "is -1"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 60_000) + b"(" * 60_000, "cannot be read"),
    ],
)
def test_a_wrong_npy_header_is_an_error(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "x.npy").write_bytes(data)
    assert words in error_of(tmp_path / "x.npy")


def test_members_of_a_zip_that_overlap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.ones(100), b=np.ones(100))
    raw = path.read_bytes()
    last = raw.rfind(b"PK\x01\x02")
    path.write_bytes(raw[: last + 42] + struct.pack("<I", 0) + raw[last + 46 :])  # b lies where a lies
    assert "overlap" in error_of(path)


def test_a_dataset_that_declares_far_more_than_it_stores_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("w", (10**12,), "f4", chunks=(1000,))[0] = 1.0
    assert "declares 4000000000000 bytes" in error_of(tmp_path / "x.h5")


def test_sparse_indices_outside_of_the_shape_are_an_error(tmp_path: Path) -> None:
    wrong = torch.sparse_coo_tensor(torch.tensor([[5]]), torch.tensor([NAN]), (2,), check_invariants=False)
    torch.save({"w": wrong}, tmp_path / "x.pt")
    assert "indices do not fit its shape [2]" in error_of(tmp_path / "x.pt")


def test_a_flipped_bit_in_a_tensor_is_found_by_the_check_sum_of_the_archive(tmp_path: Path) -> None:
    torch.save({"w": torch.full((1000,), 1.5)}, tmp_path / "x.pt")
    raw = bytearray((tmp_path / "x.pt").read_bytes())
    raw[raw.find(struct.pack("<f", 1.5) * 4) + 20] ^= 1
    (tmp_path / "x.pt").write_bytes(raw)
    result = scan_file(tmp_path / "x.pt")
    assert "CRC-32" in str(result.error)
    assert result.tensors == 1  # scanned all the same


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("x.pt", b"", "empty"),
        ("x.bin", b"version https://git-lfs.example/spec/v1\noid", "git lfs pull"),
        ("x.pth", b"<!DOCTYPE html>", "web page"),
        ("x.ckpt", b"\x1f\x8b\x08", "gzip"),
        ("x.safetensors", b"abc", "no known format"),
        ("x.h5", bytes(100), "no known format"),
    ],
)
def test_a_foreign_file_is_called_what_it_is(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert words in error_of(tmp_path / name)


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("whole")
    state = {
        "w": torch.rand(30, 4),
        "o": {"s": [torch.rand(5).half(), np.arange(3.0)]},
        "n": 3,
        "m": torch.nn.Linear(2, 2),
    }
    sparse = {"c": torch.eye(3).to_sparse(), "e": torch.ones(1).expand(4)}
    torch.save(state, folder / "a.pt")
    torch.save(sparse, folder / "b.pt")
    torch.save(state, folder / "c.pth", _use_new_zipfile_serialization=False)
    for protocol in (0, 2, 5):
        (folder / f"d{protocol}.pkl").write_bytes(pickle.dumps(state, protocol))
    safetensors.torch.save_file({"w": torch.rand(9), "v": torch.rand(3, 3)}, folder / "e.safetensors")
    np.savez_compressed(folder / "f.npz", a=np.random.rand(50), b=np.ones(3, ">f4"))
    np.save(folder / "g.npy", np.random.rand(5))
    return sorted(folder.iterdir())


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Cut off, or with some bytes changed, mostly near the start and the end, where the structure is."""
    if rng.random() < 0.2:
        return data[: rng.randrange(len(data))]
    raw = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        place = rng.choice([rng.randrange(min(len(raw), 500)), len(raw) - 1 - rng.randrange(min(len(raw), 800)),
                            rng.randrange(len(raw))])  # fmt: skip
        raw[place] = rng.choice([rng.randrange(256), 0, 255, raw[place] ^ (1 << rng.randrange(8))])
    return bytes(raw)


def test_damaged_files_never_raise_and_never_hang(
    tmp_path: Path, whole_files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rng, errors = random.Random(0), 0
    for round_number in range(1500):
        source = rng.choice(whole_files)
        path = tmp_path / source.name
        path.write_bytes(damaged(rng, source.read_bytes()))
        begin = time.monotonic()
        code = main(["scan", str(path)])
        out, err = capsys.readouterr()
        assert code in (0, 1, 2) and "Traceback" not in out + err, (round_number, source.name)
        assert time.monotonic() - begin < 20, (round_number, source.name)
        errors += code > 0
    assert errors > 700


def test_a_damaged_hdf5_file_never_takes_the_scanner_with_it(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "whole.h5", "w") as file:
        file.create_dataset("a/b", data=np.random.rand(100), chunks=(10,), compression="gzip")
        file["c"] = np.ones(3)
    data, rng = (tmp_path / "whole.h5").read_bytes(), random.Random(0)
    for _ in range(15):
        (tmp_path / "x.h5").write_bytes(damaged(rng, data))
        scan_file(tmp_path / "x.h5")


def test_a_crash_of_the_hdf5_library_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crash.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setattr("nanscan.files.hdf5.hdf5_child.__file__", str(tmp_path / "crash.py"))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["w"] = np.ones(3)
    assert "crashed on it (signal 11)" in error_of(tmp_path / "x.h5")


def test_a_hang_of_the_hdf5_library_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hang.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr("nanscan.files.hdf5.hdf5_child.__file__", str(tmp_path / "hang.py"))
    monkeypatch.setattr("nanscan.files.hdf5._PATIENCE", 0.5)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["w"] = np.ones(3)
    assert "hangs on it" in error_of(tmp_path / "x.h5")


def test_a_file_of_a_gigabyte_is_scanned_in_little_memory(tmp_path: Path) -> None:
    size = 1 << 30
    header = json.dumps({"w": entry([size // 4], 0, size)}).encode()
    with open(tmp_path / "x.safetensors", "wb") as file:  # a sparse file: it takes no disk
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(size - 4, 1)
        file.write(struct.pack("<f", NAN))
    program = textwrap.dedent("""
        import resource, sys
        from nanscan.files.scan import scan_file
        from nanscan import scan
        import torch
        scan([torch.ones(3)])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (row,) = scan_file(__import__("pathlib").Path(sys.argv[1])).rows
        print(row.nan_count, row.first_bad[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "x.safetensors"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    nan_count, first, grown = map(int, done.stdout.split())
    assert (nan_count, first) == (1, size // 4 - 1)
    assert grown < 120_000  # kB
