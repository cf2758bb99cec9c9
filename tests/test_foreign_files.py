"""Files that are taken for a checkpoint and are none, older and newer ones: each is told by name, with what to do."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint

import nanscan
from nanscan.cli import main

NAN = float("nan")
ONNX = b"\x08\x0a\x12\x07pytorch\x1a\x062.13.0:\x9e\x01" + b"\0" * 100


def load_says(path: Path) -> str:
    with pytest.raises(nanscan.CheckpointError) as caught:
        nanscan.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def command_says(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(list(map(str, arguments))) in (1, 2)
    shown = capsys.readouterr()
    return shown.out + shown.err


@pytest.mark.filterwarnings("ignore")
def test_models_of_other_kinds_are_named_by_load_and_by_both_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(program, tmp_path / "program.pt2")
    (tmp_path / "net.onnx").write_bytes(ONNX)
    np.savez(tmp_path / "arrays.pt.npz", a=np.ones(2))
    for file, words in (("program.pt2", "torch.export.load"), ("net.onnx", "an ONNX model")):
        for said in (
            load_says(tmp_path / file),
            command_says(capsys, "scan", tmp_path / file),
            command_says(capsys, "pickle", tmp_path / file),
        ):
            assert words in said
    assert "numpy.load" in load_says(tmp_path / "arrays.pt.npz")


@pytest.mark.filterwarnings("ignore")
def test_a_sharded_folder_is_named_and_never_passed_over_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.distributed.checkpoint.save({"w": torch.tensor([NAN])}, checkpoint_id=tmp_path / "step-1")
    torch.save({"step": torch.ones(1)}, tmp_path / "step-1" / "rest.pt")
    assert "dcp_to_torch" in load_says(tmp_path / "step-1")
    assert "dcp_to_torch" in command_says(capsys, "pickle", tmp_path / "step-1")
    assert main(["scan", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "dcp_to_torch" in shown.err and "rest.pt: all finite" in shown.out


def test_a_damaged_file_of_the_old_format_is_a_corrupt_checkpoint(tmp_path: Path) -> None:
    path, dice = tmp_path / "old.pt", random.Random(0)
    torch.save({"w": torch.ones(50), "s": {"x": [1, 2.5]}}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    changed = [content[:end] for end in range(0, len(content), 29)]
    for _ in range(60):
        flipped = bytearray(content)
        flipped[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        changed.append(bytes(flipped))
    for number, data in enumerate(changed):
        path.write_bytes(data)
        with pytest.warns() if data.startswith(content[:15]) else pytest.raises(nanscan.CheckpointError):
            try:
                nanscan.load(path)
            except nanscan.CheckpointError as error:
                cut = len(data) < len(content)
                assert str(path) in str(error) and (not cut or isinstance(error, nanscan.CorruptCheckpoint)), number
                if not data.startswith(content[:15]):
                    raise


def test_a_file_of_a_newer_pytorch_says_that_this_one_is_too_old(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "now.pt")
    with zipfile.ZipFile(tmp_path / "now.pt") as now, zipfile.ZipFile(tmp_path / "later.pt", "w") as later:
        for name in now.namelist():
            later.writestr(name, b"99\n" if name.endswith("version") else now.read(name))
    said = load_says(tmp_path / "later.pt")
    assert "newer PyTorch" in said and "99" in said and "update" in said
