"""`nanscan.load`: every damaged file is refused with the reason, and no file runs code."""

from __future__ import annotations

import errno
import io
import os
import pickle
import random
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import nanscan
from nanscan.checkpoint import digest, layout
from nanscan.checkpoint.load import verify_file
from nanscan.checkpoint.reader import VerifyingReader

BIAS = torch.arange(60.0) + 0.5
STATE = {
    "model": {"fc.weight": torch.arange(3000.0).view(50, 60), "fc.bias": BIAS},
    "optimizer": {"state": {0: {"exp_avg": torch.arange(5000.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    "step": 7,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return nanscan.save(STATE, tmp_path / "last.pt")


def corrupt(path: Path, content: bytes, reason: str | None = None) -> str:
    """Both `load` and `verify_file` must refuse this content; returns the message."""
    path.write_bytes(content)
    with pytest.raises(nanscan.CorruptCheckpoint, match=reason) as caught:
        nanscan.load(path)
    with pytest.raises(nanscan.CorruptCheckpoint):
        verify_file(path)
    assert repr(str(path)) in str(caught.value)
    return str(caught.value)


def test_a_safetensors_file_of_another_name_is_told_by_its_content(tmp_path: Path) -> None:
    content = nanscan.save({"w": torch.ones(3)}, tmp_path / "a.safetensors").read_bytes()
    corrupt(tmp_path / "a.pt", content, r"give it the suffix \.safetensors")


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def test_a_hundred_random_bit_flips_are_all_detected_and_name_the_tensor(saved: Path) -> None:
    content, dice, named = saved.read_bytes(), random.Random(0), 0
    for _ in range(100):
        text = corrupt(saved, flipped(content, dice.randrange(len(content) * 8)))
        named += "tensor " in text
    assert named > 60  # most of the file is tensors


def test_of_many_small_tensors_among_large_and_empty_ones_exactly_the_damaged_are_named(tmp_path: Path) -> None:
    state: dict[str, torch.Tensor] = {f"small{i}": torch.full((1000,), float(i)) for i in range(300)}
    state["large"] = torch.zeros(3 << 20)  # enough for several threads
    state |= {"last": torch.full((9,), 0.5), "empty": torch.zeros(0)}
    path = nanscan.save(state, tmp_path / "many.pt")
    content = bytearray(path.read_bytes())
    for value in (17.0, 64.0, 299.0, 0.5):
        content[content.index(torch.full((9,), value).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        nanscan.CorruptCheckpoint, match="tensor small17, tensor small64, tensor small299, tensor last are not"
    ):
        verify_file(str(path))


def test_a_flip_in_any_byte_around_the_tensors_is_detected(saved: Path) -> None:
    content, dice = saved.read_bytes(), random.Random(1)
    for byte in [*range(0, 1200, 2), *range(len(content) - 2400, len(content), 3)]:
        saved.write_bytes(flipped(content, byte * 8 + dice.randrange(8)))
        with pytest.raises(nanscan.CorruptCheckpoint):
            nanscan.load(saved)


def test_a_damaged_tensor_is_kept_by_the_reader_and_not_raised_into_torch_where_it_could_get_lost(saved: Path) -> None:
    content = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        header = archive.getinfo("archive/data/0").header_offset
    start = layout.data_start(content[header : header + 30], header)
    saved.write_bytes(flipped(content, start * 8))
    with saved.open("rb") as file:
        seal = digest.read_seal(file.fileno(), str(saved))
        assert seal is not None
        reader = VerifyingReader(file.fileno(), str(saved), seal)
        reader.seek(start)
        assert reader.readinto(bytearray(3000 * 4)) == 3000 * 4
    assert reader.failure is not None and 'model["fc.weight"]' in str(reader.failure)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("archive/data/0", r'tensor model\["fc.weight"\]'),
        ("archive/data/2", r'tensor optimizer\["state"\]\[0\]\["exp_avg"\]'),
        ("archive/data.pkl", "member 'archive/data.pkl'"),
        ("archive/version", "member 'archive/version'"),
        ("archive/.nanscan/digests", "its end"),
    ],
)
def test_each_part_of_the_file_is_named_when_it_is_damaged(saved: Path, where: str, words: str) -> None:
    content = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        header = archive.getinfo(where).header_offset
    start = layout.data_start(content[header : header + 30], header)
    corrupt(saved, flipped(content, start * 8 + 3), words)
    if "digests" not in where:
        corrupt(saved, flipped(content, (header + 8) * 8), "zip headers or padding")


@pytest.mark.parametrize("record", [b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"nanscan xxh3_128"])
def test_the_directory_and_the_end_records_are_named_when_they_are_damaged(saved: Path, record: bytes) -> None:
    content = saved.read_bytes()
    for offset in range(12):
        corrupt(
            saved, flipped(content, (content.rindex(record) + offset) * 8 + 1), "its end|end record|end of the arch"
        )


def test_truncation_at_every_fiftieth_is_detected_also_without_verification(saved: Path) -> None:
    content = saved.read_bytes()
    for part in range(50):
        text = corrupt(saved, content[: len(content) * part // 50])
        assert "is empty" in text if part == 0 else "truncated" in text or "no checkpoint" in text or "corrupt" in text
        with pytest.raises(nanscan.CorruptCheckpoint):
            nanscan.load(saved, verify=False)
    for missing in range(1, 200):
        corrupt(saved, content[:-missing])


@pytest.mark.parametrize("more", [b"\0", b"x" * 70_000, b"PK\5\6" + b"\0" * 18])
def test_bytes_that_follow_the_end_are_detected(saved: Path, more: bytes) -> None:
    corrupt(saved, saved.read_bytes() + more, rf"has {len(more):,} bytes after its end")


def test_a_file_with_a_hole_or_another_files_part_is_detected(saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    corrupt(saved, content[:4096] + b"\0" * 4096 + content[8192:], "tensor model")
    other = nanscan.save({**STATE, "step": 8}, tmp_path / "other.pt").read_bytes()
    corrupt(saved, content[:5000] + other[5000:])
    corrupt(saved, b"\0" * len(content), "begins with zeros")


def zip_of(names: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in names.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"), (b"hello, this is text", "is text: 'hello"), (b"\x89PNG\r\n\x1a\n\0", "a PNG image"),
        (pickle.dumps({"w": 1}), "a plain pickle"), (zip_of({"a.txt": b"hi"}), "zip archive, but no checkpoint"),
        (b"\x1f\x8b\x08\0\0\0", "gzip"), (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"PK\3\4" + b"\0" * 100, "end of the archive is missing"), (b"\x7fOLF\x02\x01\x01", "first bytes 7f 4f 4c 46"),
    ],
)  # fmt: skip
def test_a_foreign_file_is_refused_with_what_it_is(tmp_path: Path, content: bytes, reason: str) -> None:
    corrupt(tmp_path / "a.pt", content, reason)


def test_a_plain_torch_file_loads_quietly_and_its_check_sums_count(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "a.pt"
    torch.save(STATE, path)
    assert nanscan.load(path)["step"] == 7 and not recwarn.list
    content = path.read_bytes()
    corrupt(path, flipped(content, content.index(BIAS.numpy().tobytes()) * 8 + 9), "data/1.*CRC-32")
    nanscan.load(path, verify=False)  # as torch does


def test_a_file_of_the_old_format_loads_with_a_warning_that_nothing_could_be_verified(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.warns(nanscan.CheckpointWarning, match="without check sums"):
        assert nanscan.load(tmp_path / "old.pt")["w"].sum() == 3


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore::nanscan.CheckpointWarning")
@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_file_is_never_run_by_default(tmp_path: Path, legacy: bool) -> None:
    torch.save({"w": Malicious(tmp_path / "owned")}, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(nanscan.CheckpointError, match="would run code when it is unpickled.*mkdir"):
        nanscan.load(tmp_path / "a.pt")
    verify_file(tmp_path / "a.pt")
    assert not (tmp_path / "owned").exists()
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Malicious(tmp_path / "owned")))
    for weights_only in (True, False):
        with pytest.raises(nanscan.CorruptCheckpoint, match="plain pickle"):
            nanscan.load(tmp_path / "b.pt", weights_only=weights_only)
    assert not (tmp_path / "owned").exists()


def test_damaged_pickle_data_is_refused_before_it_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = nanscan.save(STATE, tmp_path / "a.pt")
    content = path.read_bytes()
    path.write_bytes(flipped(content, 70 * 8))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises(nanscan.CorruptCheckpoint, match="data.pkl"):
        nanscan.load(path, weights_only=False)


def test_a_refused_global_is_named_with_what_to_do(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "args": Namespace(lr=0.1), "out": frozenset({1})}, tmp_path / "a.pt")
    with pytest.raises(nanscan.CheckpointError, match="holds argparse.Namespace, frozenset") as caught:
        nanscan.load(tmp_path / "a.pt")
    assert "torch.serialization.add_safe_globals([argparse.Namespace, frozenset])" in str(caught.value)
    assert "weights_only=False" in str(caught.value)
    assert nanscan.load(tmp_path / "a.pt", weights_only=False)["args"].lr == 0.1


def test_a_torchscript_archive_is_named(tmp_path: Path) -> None:
    names = {"a/constants.pkl": b"", "a/data.pkl": b"", "a/version": b"3"}
    (tmp_path / "a.pt").write_bytes(zip_of(names))
    with pytest.raises(nanscan.CheckpointError, match="torch.jit.load"):
        nanscan.load(tmp_path / "a.pt")


def test_a_missing_file_and_a_directory_are_system_errors(tmp_path: Path) -> None:
    for path, number in ((tmp_path / "no.pt", errno.ENOENT), (tmp_path, errno.EISDIR)):
        for function in (nanscan.load, verify_file):
            with pytest.raises(nanscan.CheckpointSystemError) as caught:
                function(path)
            assert caught.value.errno == number and caught.value.filename == str(path)
            assert isinstance(caught.value, OSError)
    with pytest.raises(TypeError, match="str or pathlib.Path"):
        nanscan.load(io.BytesIO(b""))  # type: ignore[arg-type]


def test_map_location_is_torchs(saved: Path) -> None:
    assert nanscan.load(saved, map_location="meta")["model"]["fc.bias"].device.type == "meta"
    loaded = nanscan.load(saved, map_location=lambda storage, _: storage)
    assert torch.equal(loaded["model"]["fc.bias"], BIAS)


def test_every_byte_is_compared_although_map_location_reads_nothing(saved: Path) -> None:
    content = saved.read_bytes()
    at = content.index(BIAS.numpy().tobytes())
    saved.write_bytes(flipped(content, at * 8))
    with pytest.raises(nanscan.CorruptCheckpoint, match="fc.bias"):
        nanscan.load(saved, map_location="meta")


def test_each_tensor_is_read_from_the_file_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, preadv = [0], os.preadv

    def counted(fd: int, buffers: list[memoryview], at: int) -> int:
        got = preadv(fd, buffers, at)
        read[0] += got
        return got

    monkeypatch.setattr(os, "preadv", counted)
    nanscan.load(saved)
    tensors = (3000 + 60 + 5000) * 4
    assert tensors <= read[0] < tensors + 12_000


def test_loading_with_damaged_tensors_says_so_although_torch_wraps_errors(tmp_path: Path) -> None:
    path = nanscan.save({"w": torch.arange(10_000_000)}, tmp_path / "a.pt")
    content = path.read_bytes()
    corrupt(path, flipped(content, (len(content) // 2) * 8), "the bytes of tensor w are not those")
