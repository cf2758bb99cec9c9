"""`nanscan scan`: what it prints, its exit codes, folders, shards, and files of nanscan's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from nanscan.cli import main
from nanscan.cli.output import printable
from tests.cli_server import Server

NAN, INF = float("nan"), float("inf")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole file, one with a NaN, one with an Inf, a damaged one."""
    torch.save({"w": torch.ones(2, 3), "n": torch.arange(3)}, tmp_path / "good.pt")
    torch.save({"fc.weight": torch.tensor([[3.0, 4.0], [NAN, INF]]), "fc.bias": torch.ones(2)}, tmp_path / "nan.pt")
    safetensors.torch.save_file({"mask": torch.tensor([0.0, -INF])}, tmp_path / "inf.safetensors")
    (tmp_path / "torn.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:300])
    return tmp_path


def scan(*arguments: str | Path) -> int:
    return main(["scan", *map(str, arguments)])


def document(capsys: Capture, *arguments: str | Path) -> dict[str, Any]:
    scan(*arguments, "--json")
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_command_prints_a_row_for_each_bad_tensor_and_a_summary(folder: Path, server: Server) -> None:
    done = server.run(folder, "scan", "nan.pt", "good.pt")
    assert (done.code, done.err) == (1, "")
    summary, head, row, good = done.out.splitlines()
    assert summary.startswith("nan.pt: 1 NaN, 1 Inf in 1 tensor (torch zip, 2 tensors, 6 elements, ")
    assert head.split() == ["name", "shape", "dtype", "nan_count", "inf_count", "first_bad", "finite_norm", "inf_norm"]
    assert row.split() == ["fc.weight", "[2,", "2]", "float32", "1", "1", "[1,", "0]", "5", "4"]
    assert good.startswith("good.pt: all finite (torch zip, 1 tensor, 6 elements, ")
    assert good.endswith("1 skipped (no floating-point numbers))")


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["good.pt"], 0),
        (["nan.pt"], 1),
        (["inf.safetensors"], 1),
        (["inf.safetensors", "--nan-only"], 0),
        (["nan.pt", "--nan-only"], 1),
        (["torn.pt"], 1),
        (["absent.pt"], 2),
        (["nan.pt", "absent.pt"], 2),
        (["good.pt", "torn.pt"], 1),
        ([], 2),
    ],
)
def test_exit_code_0_finite_1_found_2_misuse(folder: Path, names: list[str], code: int) -> None:
    assert scan(*[name if name.startswith("--") else folder / name for name in names]) == code


def test_a_missing_file_is_told_on_stderr_and_the_others_are_scanned(folder: Path, capsys: Capture) -> None:
    assert scan(folder / "absent.pt", folder / "nan.pt") == 2
    out, err = capsys.readouterr()
    assert "1 NaN, 1 Inf" in out
    assert err == f"nanscan: {folder}/absent.pt: cannot be scanned: No such file or directory\n"


def test_a_damaged_file_is_told_with_the_reason(folder: Path, capsys: Capture) -> None:
    assert scan(folder / "torn.pt") == 1
    assert "torn.pt: damaged: its zip directory cannot be read" in capsys.readouterr().out


def test_json_is_one_document_with_everything(folder: Path, capsys: Capture) -> None:
    found = document(capsys, folder / "nan.pt", folder / "torn.pt", folder / "absent.pt")
    assert (found["finite"], found["exit_code"]) == (False, 2)
    assert found["error"] == f"{folder}/absent.pt: No such file or directory"
    first, torn, absent = found["files"]
    assert first["bad"] == [
        {"name": "fc.weight", "shape": [2, 2], "dtype": "float32", "nan_count": 1, "inf_count": 1,
         "first_bad": [1, 0], "finite_norm": 5.0, "inf_norm": 4.0}
    ]  # fmt: skip
    assert (first["tensors"], first["elements"], first["skipped"], first["error"]) == (2, 6, 0, None)
    assert "cut off" in torn["error"] and absent["tensors"] == 0
    assert "rows" not in first
    assert [row["name"] for row in document(capsys, "--all", folder / "nan.pt")["files"][0]["rows"]] == [
        "fc.weight",
        "fc.bias",
    ]


def test_all_prints_every_tensor_with_its_norm(folder: Path, capsys: Capture) -> None:
    assert scan("--all", folder / "good.pt") == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.split() == ["w", "[2,", "3]", "float32", "0", "0", "-", "2.44949", "1"]


def test_a_folder_is_searched_by_suffix_each_file_once(folder: Path, capsys: Capture) -> None:
    (folder / "sub").mkdir()
    np.savez(folder / "sub" / "a.npz", a=np.ones(2))
    (folder / "sub" / "notes.txt").write_text("no tensors")
    (folder / "sub" / "loop").symlink_to(folder)
    (folder / "again.pt").symlink_to(folder / "good.pt")
    found = document(capsys, folder, folder / "good.pt")
    names = [str(Path(file["path"]).relative_to(folder)) for file in found["files"]]
    assert names == ["again.pt", "inf.safetensors", "nan.pt", "torn.pt", "sub/a.npz"]


def test_a_link_that_leads_back_to_itself_is_told_and_the_others_are_scanned(folder: Path, capsys: Capture) -> None:
    (folder / "loop.pt").symlink_to("loop.pt")
    assert scan(folder) == scan(folder / "loop.pt", folder / "nan.pt") == 2
    out, err = capsys.readouterr()
    assert out.count("nan.pt: 1 NaN, 1 Inf") == 2
    assert err == f"nanscan: {folder}/loop.pt: cannot be scanned: Too many levels of symbolic links\n" * 2


def test_a_folder_in_a_folder_that_can_not_be_listed_is_told_and_the_rest_is_scanned(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for _ in range(20):  # beyond the longest path that the system takes
        os.mkdir("d" * 240)
        os.chdir("d" * 240)
    os.chdir(folder)
    assert scan(folder) == 2
    out, err = capsys.readouterr()
    assert "nan.pt: 1 NaN, 1 Inf" in out
    assert err.count("\n") == 1 and err.endswith("dd: cannot be scanned: File name too long\n")


def test_a_folder_that_vanishes_meanwhile_does_not_stop_the_others(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "gone").mkdir()
    walk = os.walk

    def vanishing(*args: Any, **kwargs: Any) -> Any:
        for here, *others in walk(*args, **kwargs):
            if here.endswith("gone"):  # listed, and looked at no more
                os.rmdir(here)
            yield here, *others

    monkeypatch.setattr(os, "walk", vanishing)
    assert scan(folder) == 1
    out, err = capsys.readouterr()
    assert "nan.pt: 1 NaN, 1 Inf" in out and err == ""


def test_an_empty_name_is_not_the_working_folder(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert scan("") == 2
    assert capsys.readouterr().err == "nanscan: Invalid value for 'FILE...': an empty name. See: nanscan scan --help\n"


def test_a_folder_without_checkpoints_is_misuse(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "notes.txt").write_text("no tensors")
    assert scan(tmp_path) == 2
    assert "no file in this folder has a known suffix" in capsys.readouterr().err


@pytest.fixture(params=["safetensors", "bin"])
def sharded(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[Path]]:
    """An index and its two shards, as the Hugging Face Hub has them."""
    kind = str(request.param)
    stem = "model" if kind == "safetensors" else "pytorch_model"
    shards = [tmp_path / f"{stem}-0000{i}-of-00002.{kind}" for i in (1, 2)]
    tensors = [{"a.weight": torch.ones(2)}, {"b.weight": torch.tensor([NAN]), "b.ids": torch.arange(2)}]
    for shard, part in zip(shards, tensors, strict=True):
        (safetensors.torch.save_file if kind == "safetensors" else torch.save)(part, shard)
    weights = {name: shard.name for shard, part in zip(shards, tensors, strict=True) for name in part}
    index = tmp_path / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 28}, "weight_map": weights}))
    return index, shards


@pytest.mark.parametrize("named", ["index", "folder"])
def test_a_model_in_shards_is_scanned_through_its_index(
    sharded: tuple[Path, list[Path]], named: str, capsys: Capture
) -> None:
    index, shards = sharded
    found = document(capsys, index if named == "index" else index.parent)
    assert [file["path"] for file in found["files"]] == [*map(str, shards), str(index)]
    assert found["files"][1]["bad"][0]["name"] == "b.weight"
    assert (found["files"][2]["error"], found["exit_code"]) == (None, 1)


def test_a_missing_shard_and_a_missing_tensor_are_named(sharded: tuple[Path, list[Path]], capsys: Capture) -> None:
    index, shards = sharded
    shards[1].unlink()
    content = json.loads(index.read_text())
    content["weight_map"]["c.weight"] = shards[0].name
    index.write_text(json.dumps(content))
    assert scan(index) == 1
    out = capsys.readouterr().out
    assert f"shard '{shards[0].name}' lacks 1 of 2 tensors: 'c.weight'" in out
    assert f"shard '{shards[1].name}' is missing (2 tensors)" in out


@pytest.mark.parametrize("target", ["../secret.pt", "/etc/passwd", "a\0b", 3])
def test_an_index_reaches_no_file_outside_of_its_folder(tmp_path: Path, target: Any, capsys: Capture) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": target}}))
    assert scan(index) == 1
    assert "outside of its folder" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', "[" * 100_000])
def test_what_is_no_index_is_damaged(tmp_path: Path, text: str, capsys: Capture) -> None:
    (tmp_path / "m.safetensors.index.json").write_text(text)
    assert scan(tmp_path) == 1
    assert "it is no index of shards" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".h5"])
def test_a_changed_file_of_nanscan_save_is_damaged(tmp_path: Path, capsys: Capture, suffix: str) -> None:
    path = nanscan_save({"w": torch.full((1000,), 1.5)}, tmp_path / f"last{suffix}")
    assert scan(path) == 0
    raw = bytearray(path.read_bytes())
    raw[raw.find(np.full(4, 1.5, np.float32).tobytes()) + 20] ^= 1
    path.write_bytes(raw)
    capsys.readouterr()
    assert scan(path) == 1
    out = capsys.readouterr().out
    assert "damaged: " in out and ("tensor" in out or "digest" in out)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".h5"])
def test_what_nanscan_save_writes_is_scanned_in_its_own_dtypes(tmp_path: Path, capsys: Capture, suffix: str) -> None:
    weight = torch.tensor([1.0, NAN], dtype=torch.bfloat16)
    path = nanscan_save({"emb": weight, "head": weight}, tmp_path / f"last{suffix}", check_finite=False)
    (row,) = document(capsys, path)["files"][0]["bad"]
    assert (row["dtype"], row["first_bad"], row["nan_count"]) == ("bfloat16", [1], 1)
    assert suffix == ".h5" or row["name"] == "emb (= head)"


def nanscan_save(value: Any, path: Path, **options: Any) -> Path:
    from nanscan.checkpoint.save import save

    return Path(save(value, path, **options))


def test_names_in_a_file_cannot_steer_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    torch.save({"w\x1b[2J\n\ud800": torch.tensor([NAN])}, tmp_path / "x.pt")
    assert scan(tmp_path / "x.pt") == 1
    out = capsys.readouterr().out
    assert "w\\x1b[2J\\n\\ud800" in out and "\x1b" not in out
    assert printable("n" * 1000, 300) == "n" * 280 + "…" + "n" * 19


def test_without_h5py_the_extra_is_named(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    monkeypatch.setattr("nanscan.files.hdf5.importlib.util.find_spec", lambda name: None)
    assert scan(tmp_path / "x.h5") == 2
    assert "pip install 'nanscan[hdf5]'" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_misuse(folder: Path, capsys: Capture) -> None:
    (folder / "good.pt").chmod(0)
    assert scan(folder / "good.pt") == 2
    assert "Permission denied" in capsys.readouterr().err


def test_a_pipe_is_not_waited_for(tmp_path: Path, capsys: Capture) -> None:
    os.mkfifo(tmp_path / "x.pt")
    assert scan(tmp_path / "x.pt") == 2
    assert "neither a file nor a folder" in capsys.readouterr().err


def test_help_says_what_the_exit_codes_mean(capsys: Capture) -> None:
    assert main(["scan", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("0 all finite", "1 a NaN or Inf", "2 (wins)", "--nan-only", "--all", "--json"):
        assert words in out
