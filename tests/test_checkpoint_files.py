"""Safetensors and HDF5 files by suffix: the same promises as for torch files."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import h5py
import pytest
import safetensors.torch
import torch

import nanscan
from nanscan.checkpoint import atomic
from nanscan.checkpoint.load import verify_file

SUFFIXES = ("safetensors", "h5")
DTYPES = (
    "float64 float32 float16 bfloat16 complex64 bool int64 int32 int16 int8 uint8 uint16 uint32 uint64 float8_e4m3fn "
    "float8_e5m2"
)


def tensors() -> dict[str, torch.Tensor]:
    weight = torch.arange(1200.0).view(40, 30)
    return {"emb.weight": weight, "head.weight": weight, "turned": weight.t(), "row": weight[3], "scalar": weight[0, 1]}


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", DTYPES.split())
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, suffix: str, dtype: str) -> None:
    values = torch.arange(6).view(2, 3).to(torch.float32).to(getattr(torch, dtype))
    path = nanscan.save({"t": values, "empty": values[:0]}, tmp_path / f"a.{suffix}")
    loaded = nanscan.load(path)
    assert loaded["t"].dtype == values.dtype and loaded["empty"].shape == (0, 3)
    assert torch.equal(loaded["t"].view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_views_and_tied_tensors_come_back(tmp_path: Path, suffix: str) -> None:
    path = nanscan.save(tensors(), tmp_path / f"a.{suffix}")
    verify_file(path)
    loaded = nanscan.load(path)
    assert loaded["emb.weight"] is loaded["head.weight"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())
    assert path.stat().st_size < 2 * 4800 + 12_000  # the tied one is stored once


def test_other_readers_open_the_files(tmp_path: Path) -> None:
    state = {"model": {"fc.weight": torch.arange(6.0).view(2, 3)}}
    path = nanscan.save(state, tmp_path / "a.safetensors")
    assert torch.equal(safetensors.torch.load_file(path)["model.fc.weight"], state["model"]["fc.weight"])
    with h5py.File(nanscan.save(state, tmp_path / "a.h5"), "r") as file:
        assert file["model/fc.weight"][()].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_files_of_other_writers_open(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    assert nanscan.load(tmp_path / "a.safetensors")["w"].sum() == 3
    with h5py.File(tmp_path / "a.hdf5", "w", userblock_size=512) as file:
        file["group/w"] = [1.0, 2.0]
        file.attrs["epoch"] = 3
    loaded = nanscan.load(tmp_path / "a.hdf5")
    assert loaded["group"]["w"].tolist() == [1.0, 2.0] and loaded["epoch"] == 3


def test_hdf5_keeps_nesting_numbers_and_texts(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "step": 7,
        "lr": 0.1,
        "name": "Größe",
        "ok": True,
        "big": 2**63,
        "empty": {},
        "a": {"b": {"c": 1}},
    }
    loaded = nanscan.load(nanscan.save({**state, "w": torch.ones(2)}, tmp_path / "a.h5"))
    assert loaded.pop("w").sum() == 2
    assert loaded == state and [type(loaded[key]) for key in state] == [type(state[key]) for key in state]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_bit_flips_truncation_and_appended_bytes_are_all_detected(tmp_path: Path, suffix: str) -> None:
    path = nanscan.save({"model": tensors()}, tmp_path / f"a.{suffix}")
    content, dice, named = path.read_bytes(), random.Random(0), 0
    damaged = [flipped(content, dice.randrange(len(content) * 8)) for _ in range(100)]
    damaged += [flipped(content, byte * 8 + dice.randrange(8)) for byte in range(520)]
    damaged += [content[: len(content) * part // 50] for part in range(50)] + [content + b"\0"]
    for changed in damaged:
        path.write_bytes(changed)
        with pytest.raises(nanscan.CorruptCheckpoint) as caught:
            nanscan.load(path)
        with pytest.raises(nanscan.CorruptCheckpoint):
            verify_file(path)
        named += "tensor model" in str(caught.value)
    assert named > 25


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_a_format_can_not_hold_is_refused_by_path(tmp_path: Path, suffix: str) -> None:
    state = {
        "a": {"list": [1], 3: torch.ones(1)},
        "lock": threading.Lock(),
        "sparse": torch.ones(2).to_sparse(),
        "w": torch.ones(1),
    }
    with pytest.raises(nanscan.CheckpointError) as caught:
        nanscan.save(state, tmp_path / f"a.{suffix}")
    assert [problem.path for problem in caught.value.problems] == [  # type: ignore[attr-defined]
        'state["a"]["list"]', 'state["a"][3]', 'state["lock"]', 'state["sparse"]',
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []
    with pytest.warns(nanscan.CheckpointWarning, match=r'state\["lock"\]'):
        path = nanscan.save(state, tmp_path / f"a.{suffix}", on_unpicklable="drop")
    assert nanscan.load(path)["w"].sum() == 1
    with pytest.raises(nanscan.CheckpointError, match="state_dict"):
        nanscan.save(torch.nn.Linear(1, 1), tmp_path / f"b.{suffix}")


def test_two_tensors_of_one_flat_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(nanscan.CheckpointError, match="would be called 'a.b' once dicts are flattened"):
        nanscan.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path / "a.safetensors")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_old_file_its_mode_and_the_finite_check_are_kept(tmp_path: Path, suffix: str) -> None:
    path = nanscan.save({"w": torch.ones(1)}, tmp_path / f"a.{suffix}")
    path.chmod(0o600)
    with pytest.raises(nanscan.NonFiniteError, match="'w' has 1 NaN"):
        nanscan.save({"w": torch.tensor([float("nan")])}, path)
    nanscan.save({"w": torch.zeros(1)}, path)
    assert path.stat().st_mode & 0o777 == 0o600 and nanscan.load(path)["w"].item() == 0
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_lock_of_the_temporary_file_outlives_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path, seen, finish = tmp_path / f"a.{suffix}", [], atomic._finish
    monkeypatch.setattr(
        atomic, "_finish", lambda new, folder: (seen.append(atomic.remove_leftovers(str(path))), finish(new, folder))[1]
    )
    nanscan.save({"w": torch.ones(1)}, path)
    assert seen == [[]] and nanscan.load(path)["w"].item() == 1


def test_links_out_of_an_hdf5_file_are_not_followed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["secret"] = h5py.ExternalLink("/other.h5", "w")
    with pytest.raises(nanscan.CheckpointError, match="not followed"):
        nanscan.load(tmp_path / "a.h5")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_map_location_is_a_device(tmp_path: Path, suffix: str) -> None:
    path = nanscan.save({"w": torch.ones(2)}, tmp_path / f"a.{suffix}")
    assert nanscan.load(path, map_location="cpu")["w"].device.type == "cpu"
    with pytest.raises(TypeError, match="stores no devices"):
        nanscan.load(path, map_location=lambda storage, _: storage)


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for suffix, extra in (("h5", "hdf5"), ("safetensors", "safetensors")):
        with pytest.raises(nanscan.CheckpointError, match=rf"pip install 'nanscan\[{extra}\]'"):
            nanscan.save({"w": torch.ones(1)}, tmp_path / f"a.{suffix}")


def test_import_brings_no_optional_library_along() -> None:
    check = "import sys, nanscan; assert not {'h5py', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
