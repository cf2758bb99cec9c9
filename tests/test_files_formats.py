"""Every format that `nanscan scan` reads: files written by the real libraries, compared with what was put in."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import nanscan
from nanscan.files import read
from nanscan.files.scan import FileScan, TensorRow, scan_file

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:Sparse CSR")
NAN, INF = float("nan"), float("inf")


def rows(path: Path) -> dict[str, TensorRow]:
    """The rows of a file that must be whole."""
    result = scan_file(path)
    assert result.error is None, result.error
    return {row.name: row for row in result.rows}


def bad(path: Path) -> dict[str, tuple[int, int, tuple[int, ...] | None]]:
    return {name: (r.nan_count, r.inf_count, r.first_bad) for name, r in rows(path).items() if not r.finite}


def saved(tmp_path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, tmp_path / "file.pt", **options)
    return tmp_path / "file.pt"


def poisoned() -> dict[str, Any]:
    """A training state with one NaN in a weight and one Inf in the optimizer's state."""
    model = nn.Sequential(OrderedDict(encoder=nn.Linear(3, 4), norm=nn.BatchNorm1d(4)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(5, 3)).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.encoder.weight[1, 2] = NAN
        optimizer.state[model.norm.weight]["exp_avg"][3] = -INF
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


EXPECTED = {
    'state["model"]["encoder.weight"]': (1, 0, (1, 2)),
    'state["optimizer"]["state"][2]["exp_avg"]': (0, 1, (3,)),
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_training_state_is_scanned_by_the_paths_that_a_person_types(tmp_path: Path, zipped: bool) -> None:
    path = saved(tmp_path, poisoned(), _use_new_zipfile_serialization=zipped)
    assert bad(path) == EXPECTED
    result = scan_file(path)
    assert result.format == ("torch zip" if zipped else "torch legacy")
    assert result.skipped == 1  # num_batches_tracked


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_plain_pickle_of_tensors_and_arrays_is_scanned_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "file.pkl"
    value = {"t": torch.tensor([1.0, NAN]), "a": np.array([[1.0, 2.0], [INF, 4.0]], order="F"), "n": [np.arange(3)]}
    path.write_bytes(pickle.dumps(value, protocol))
    assert bad(path) == {"t": (1, 0, (1,)), "a": (0, 1, (1, 0))}


def test_two_pickles_in_one_file_are_both_scanned(tmp_path: Path) -> None:
    path = tmp_path / "file.pkl"
    path.write_bytes(pickle.dumps([np.ones(2)]) + pickle.dumps([np.array([NAN])]))
    assert bad(path) == {"pickle1[0]": (1, 0, (0,))}


def test_a_long_array_in_an_old_pickle_is_decoded_while_it_is_read(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=400_000)
    values[333_333] = NAN
    path = tmp_path / "file.pkl"
    path.write_bytes(pickle.dumps({"a": values}, 2))  # as text, in UTF-8
    (row,) = rows(path).values()
    assert row.first_bad == (333_333,)
    assert row.finite_norm == pytest.approx(float(np.linalg.norm(np.delete(values, 333_333))), rel=1e-9)


class Unknown(nn.Module):
    """A class that the scanning process could import, but must not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.cache = {"last": torch.tensor([INF])}
        self.register_buffer("mean", torch.tensor([NAN, 0.0]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise AssertionError("code of the file was run")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_whole_module_is_scanned_without_its_class(tmp_path: Path, zipped: bool) -> None:
    model = Unknown()
    with torch.no_grad():
        model.layers[1].bias[0] = NAN
    path = saved(tmp_path, model, _use_new_zipfile_serialization=zipped)
    assert bad(path) == {
        "model.layers[1].bias": (1, 0, (0,)),
        'model.cache["last"]': (0, 1, (0,)),
        "model.mean": (1, 0, (0,)),
    }
    assert scan_file(path).notes == [f"loading it with pickle would call {__name__}.Unknown; nothing was called here"]


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


def test_tensors_are_found_in_every_container(tmp_path: Path) -> None:
    t = torch.tensor([NAN])
    value = {
        "l": [1, (t.clone(), "x")],
        "o": OrderedDict(a=t.clone()),
        "n": Pair(t.clone(), {"k"}),
        3: {None: t.clone()},
    }
    found = set(bad(saved(tmp_path, value)))
    assert found == {'state["l"][1][0]', 'state["o"]["a"]', 'state["n"][0]', "state[3][None]"}


def test_tied_tensors_count_once_under_all_their_names(tmp_path: Path) -> None:
    weight = torch.tensor([NAN, 1.0])
    result = scan_file(saved(tmp_path, {"emb.weight": weight, "head.weight": weight, "view": weight[1:]}))
    assert [(row.name, row.nan_count) for row in result.rows] == [("emb.weight (= head.weight)", 1), ("view", 0)]
    assert result.elements == 3


KINDS: dict[str, tuple[torch.Tensor, tuple[int, int, tuple[int, ...] | None]]] = {
    "float8_e4m3fn": (torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn), (1, 0, (1,))),
    "float8_e5m2": (torch.tensor([INF, NAN]).to(torch.float8_e5m2), (1, 1, (0,))),
    "bfloat16": (torch.tensor([[1.0], [NAN]], dtype=torch.bfloat16), (1, 0, (1, 0))),
    "float16": (torch.tensor([INF, 1.0], dtype=torch.float16), (0, 1, (0,))),
    "complex64": (torch.tensor([1 + 1j, complex(0, NAN)]), (1, 0, (1,))),
    "complex128": (torch.tensor([complex(INF, 0), 1.0], dtype=torch.complex128), (0, 1, (0,))),
    "0-dim": (torch.tensor(NAN, dtype=torch.float64), (1, 0, ())),
    "expanded": (torch.tensor([[NAN], [1.0]]).expand(2, 1000), (1000, 0, (0, 0))),
    "transposed": (torch.tensor([[0.0, 1.0, NAN], [INF, 4.0, 5.0]]).t(), (1, 1, (0, 1))),
    "channels_last": (
        torch.ones(2, 3, 2, 2).index_fill(1, torch.tensor([2]), NAN).to(memory_format=torch.channels_last),
        (8, 0, (0, 2, 0, 0)),
    ),
    "column": (torch.arange(100.0).view(10, 10).index_fill(0, torch.tensor([7]), INF)[:, 3], (0, 1, (7,))),
    "coo": (torch.tensor([[0.0, 1.0], [NAN, 0.0]]).to_sparse(), (1, 0, (1, 0))),
    "csr": (torch.tensor([[0.0, 1.0], [NAN, 0.0]]).to_sparse_csr(), (1, 0, (1, 0))),
    "csc": (torch.tensor([[0.0, 1.0], [NAN, 0.0]]).to_sparse_csc(), (1, 0, (1, 0))),
    "bsr": (torch.tensor([[0.0, 1.0, 0, 0], [0, NAN, 0, 0]]).to_sparse_bsr((2, 2)), (1, 0, (1, 1))),
    "conj": (torch.tensor([complex(NAN, 0)]).conj(), (1, 0, (0,))),
    "parameter": (nn.Parameter(torch.tensor([NAN])), (1, 0, (0,))),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_dtype_and_layout_is_counted_exactly(tmp_path: Path, kind: str) -> None:
    tensor, expected = KINDS[kind]
    path = saved(tmp_path, {"w": tensor})
    assert bad(path) == {"w": expected}
    (row,) = rows(path).values()
    assert row.shape == tuple(tensor.shape)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_what_cannot_hold_a_nan_is_counted_as_skipped(tmp_path: Path, zipped: bool) -> None:
    quantized = torch.quantize_per_channel(
        torch.rand(2, 2), torch.tensor([NAN, 1.0]), torch.tensor([0, 0]), 0, torch.qint8
    )
    value = {"i": torch.arange(3), "b": torch.tensor([True]), "q": quantized, "meta": torch.empty(3, device="meta")}
    path = saved(tmp_path, {**value, "z": torch.zeros(0, 4)}, _use_new_zipfile_serialization=zipped)
    result = scan_file(path)
    assert (result.skipped, result.tensors) == (4, 2)
    assert bad(path) == {"q.scales": (1, 0, (0,))}


def test_a_big_endian_file_is_read_in_its_own_byte_order(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.tensor([1.0, 2.0, NAN])})
    with zipfile.ZipFile(path) as archive:
        members = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            data = b"big" if name.endswith("/byteorder") else data
            data = np.frombuffer(data, "<u4").byteswap().tobytes() if name.endswith("/data/0") else data
            archive.writestr(name, data)
    (row,) = rows(path).values()
    assert (row.nan_count, row.first_bad, row.finite_norm) == (1, (2,), pytest.approx(5**0.5))


def test_torchscript_is_scanned_without_running_it(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.bias, NAN)
    torch.jit.script(module).save(str(tmp_path / "script.pt"))
    assert bad(tmp_path / "script.pt") == {"model.bias": (2, 0, (0,))}


def test_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([[1.0, NAN]]), "b": torch.tensor([INF], dtype=torch.bfloat16), "n": torch.arange(3),
               "f8": torch.tensor([NAN]).to(torch.float8_e5m2), "z": torch.zeros(0, 3)}  # fmt: skip
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    assert bad(tmp_path / "m.safetensors") == {"a": (1, 0, (0, 1)), "b": (0, 1, (0,)), "f8": (1, 0, (0,))}
    assert scan_file(tmp_path / "m.safetensors").skipped == 1


def test_hdf5_by_its_paths_with_compression_and_what_was_never_written(tmp_path: Path) -> None:
    values = np.arange(10_000.0).reshape(100, 100)
    values[42, 17] = NAN
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file.create_dataset("model/encoder/kernel:0", data=values, chunks=(10, 10), compression="gzip")
        file.create_dataset("unwritten", (10**9,), "f4", chunks=(100,), fillvalue=INF)
        file["big"] = np.array([1, NAN], ">f8")
        file["text"], file["ids"], file["scalar"] = "hello", np.arange(3), 2.5
    assert bad(tmp_path / "m.h5") == {
        "model/encoder/kernel:0": (1, 0, (42, 17)),
        "unwritten": (0, 10**9, (0,)),
        "big": (1, 0, (1,)),
    }
    assert scan_file(tmp_path / "m.h5").skipped == 2


def test_hdf5_data_in_other_files_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "secret.raw").write_bytes(np.array([NAN]).tobytes())
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file.create_dataset("w", (1,), "f8", external=[(str(tmp_path / "secret.raw"), 0, 8)])
        file["link"] = h5py.ExternalLink("other.h5", "/w")
    result = scan_file(tmp_path / "m.h5")
    assert (result.tensors, result.skipped, result.error) == (0, 1, None)
    assert "other files" in result.notes[0]


def test_npz_and_npy_with_any_order_type_and_structure(tmp_path: Path) -> None:
    records = np.array([(1, [2.0, NAN]), (2, [3.0, 4.0])], dtype=[("id", "i4"), ("xy", "f8", (2,))])
    wide = np.array([1.0, NAN], np.longdouble)
    np.savez_compressed(tmp_path / "m.npz", r=records, f=np.array([[1, 2], [INF, 4]], ">f4", order="F"), wide=wide)
    assert bad(tmp_path / "m.npz") == {'r["xy"]': (1, 0, (0, 1)), "f": (0, 1, (1, 0)), "wide": (1, 0, (1,))}
    np.save(tmp_path / "m.npy", np.array([np.array([NAN]), None], dtype=object), allow_pickle=True)
    assert bad(tmp_path / "m.npy") == {"array[0]": (1, 0, (0,))}


@pytest.mark.parametrize("suffix", [".safetensors", ".h5", ".npz", ".xyz", ""])
def test_the_content_decides_where_the_suffix_lies(tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path, {"w": torch.tensor([NAN])}).rename(tmp_path / f"file{suffix}")
    assert bad(path) == {"w": (1, 0, (0,))}


def test_read_gives_the_tensors_that_were_saved(tmp_path: Path) -> None:
    tensors = {name: tensor for name, (tensor, _) in KINDS.items() if name != "conj"}
    tensors["i"] = torch.arange(6).view(2, 3).t()
    found = dict(read(saved(tmp_path, tensors)))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape, found[name].layout) == (tensor.dtype, tensor.shape, tensor.layout)
        wide = (found[name].to_dense().detach(), tensor.to_dense().detach())
        wide = tuple(t.float() if t.dtype.itemsize == 1 else t for t in wide)
        torch.testing.assert_close(*wide, rtol=0, atol=0, equal_nan=True)


def test_norms_agree_with_a_scan_of_the_tensors(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(300, 70).t(), "b": torch.randn(1000)[::3], "h": torch.randn(64).half()}
    report = nanscan.scan(tensors)
    for row, expected in zip(scan_file(saved(tmp_path, tensors)).rows, report.tensors, strict=True):
        assert row.finite_norm == pytest.approx(expected.norm, rel=1e-9)
        assert row.inf_norm == expected.inf_norm


def test_an_empty_state_has_nothing_to_scan_and_is_no_error(tmp_path: Path) -> None:
    result: FileScan = scan_file(saved(tmp_path, {}))
    assert (result.error, result.tensors, result.rows) == (None, 0, [])
