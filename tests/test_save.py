"""`nanscan.save`: what becomes of the file, in which order, and what is refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import threading
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

import nanscan
from nanscan.checkpoint import atomic, digest
from nanscan.checkpoint.load import verify_file

NAN, INF = float("nan"), float("inf")


def state(step: int = 1) -> dict[str, object]:
    torch.manual_seed(step)
    return {
        "model": {"fc.weight": torch.randn(50, 60), "fc.bias": torch.randn(60)},
        "step": step,
        "big": torch.full((100_000,), float(step)),
    }


def files_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_saved_file_opens_without_nanscan_and_mapped_into_memory(tmp_path: Path) -> None:
    path = nanscan.save(state(), tmp_path / "last.pt")
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert loaded["step"] == 1
        assert torch.equal(loaded["model"]["fc.weight"], state()["model"]["fc.weight"])  # type: ignore[index]
    assert zipfile.ZipFile(path).testzip() is None
    assert files_in(tmp_path) == ["last.pt"]


def test_tensors_stay_aligned_as_torch_aligns_them(tmp_path: Path) -> None:
    nanscan.save(state(), tmp_path / "a.pt")
    torch.save(state(), tmp_path / "b.pt")
    with open(tmp_path / "a.pt", "rb") as file:
        seal = digest.read_seal(file.fileno(), "a.pt")
    assert seal is not None
    assert {region.start % 64 for region in seal.regions if region.is_storage} == {0}


@pytest.mark.parametrize("numel", [0, 1, 127, 128, 65_535, 65_536, (16 << 20) // 4, (16 << 20) // 4 + 1, 10_000_001])
def test_every_size_of_tensor_comes_back(tmp_path: Path, numel: int) -> None:
    tensor = torch.arange(numel, dtype=torch.float32)
    path = nanscan.save({"t": tensor, "half": tensor[::2]}, tmp_path / "t.pt")
    verify_file(path)
    loaded = nanscan.load(path)
    assert torch.equal(loaded["t"], tensor) and torch.equal(loaded["half"], tensor[::2])
    assert loaded["half"].untyped_storage().data_ptr() == loaded["t"].untyped_storage().data_ptr()


def test_the_digest_of_a_tensor_is_of_its_storage_and_named_by_its_path(tmp_path: Path) -> None:
    import xxhash

    path = nanscan.save(state(), tmp_path / "last.pt")
    with open(path, "rb") as file:
        seal = digest.read_seal(file.fileno(), "last.pt")
    assert seal is not None
    found = {region.tensors[0]: region.digest for region in seal.regions if region.tensors}
    weight = state()["model"]["fc.weight"]  # type: ignore[index]
    assert found['model["fc.weight"]'] == xxhash.xxh3_128_hexdigest(weight.numpy().tobytes())
    assert list(found) == ['model["fc.weight"]', 'model["fc.bias"]', "big"]


def test_tied_tensors_share_one_digest_and_come_back_tied(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    path = nanscan.save({"emb": weight, "head": weight, "opt": [torch.nn.Parameter(weight)]}, tmp_path / "t.pt")
    with open(path, "rb") as file:
        seal = digest.read_seal(file.fileno(), "t.pt")
    assert seal is not None
    assert [region.tensors for region in seal.regions if region.is_storage] == [("emb", "head", "opt[0]")]
    loaded = nanscan.load(path)
    assert loaded["emb"].data_ptr() == loaded["head"].data_ptr()


def test_the_order_is_write_flush_check_rename_flush_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace, check, write = os.fsync, os.replace, digest.check_written, os.write

    def of(fd: int) -> str:
        path = os.readlink(f"/proc/self/fd/{fd}")
        return "folder" if path == str(tmp_path) else "temporary" if path.endswith(".tmp") else path

    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(f"fsync {of(fd)}"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("replace"), replace(a, b))[1])
    monkeypatch.setattr(os, "write", lambda fd, data: (done.append("write"), write(fd, data))[1])
    monkeypatch.setattr(digest, "check_written", lambda *given: (done.append("check"), check(*given))[1])
    nanscan.save(state(), tmp_path / "last.pt")
    assert [step for i, step in enumerate(done) if step != done[i - 1] or i == 0] == [
        "write", "fsync temporary", "check", "replace", "fsync folder",
    ]  # fmt: skip


def test_bytes_that_change_on_their_way_to_the_disk_are_noticed_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nanscan.save(state(1), tmp_path / "last.pt")
    fsync = os.fsync

    def spoil(fd: int) -> None:
        fsync(fd)
        at = os.fstat(fd).st_size // 2
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 4]), at)

    monkeypatch.setattr(os, "fsync", spoil)
    with pytest.raises(nanscan.CorruptCheckpoint, match="tensor big"):
        nanscan.save(state(2), path)
    monkeypatch.undo()
    assert nanscan.load(path)["step"] == 1 and files_in(tmp_path) == ["last.pt"]


def test_the_digest_is_of_what_was_written_while_the_tensor_changes(tmp_path: Path) -> None:
    tensor, end = torch.zeros(8_000_000), threading.Event()

    def change() -> None:
        while not end.is_set():
            tensor.add_(1.0)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(3):
            path = nanscan.save({"t": tensor}, tmp_path / "live.pt")
            verify_file(path)
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), MemoryError(), OSError(5, "Input/output error")])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, call: int
) -> None:
    path = nanscan.save(state(1), tmp_path / "last.pt")
    calls, write = [0], os.write

    def interrupted(fd: int, data: memoryview) -> int:
        calls[0] += 1
        if calls[0] == call:
            raise failure
        return write(fd, data)

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(type(failure)):
        nanscan.save({**state(2), "more": torch.zeros(2_000_000)}, path)
    monkeypatch.undo()
    assert calls[0] >= call
    assert nanscan.load(path)["step"] == 1 and files_in(tmp_path) == ["last.pt"]


def test_mode_bits_of_the_old_file_are_kept_and_a_new_one_has_the_default(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    before = os.umask(0o027)
    try:
        nanscan.save(state(), path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(before)
    path.chmod(0o604)
    nanscan.save(state(), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_private_file_is_never_readable_by_others_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nanscan.save(state(), tmp_path / "last.pt")
    path.chmod(0o600)
    modes, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (modes.append(stat.S_IMODE(os.fstat(fd).st_mode)), fsync(fd))[1])
    opened = atomic._open_beside
    monkeypatch.setattr(
        atomic,
        "_open_beside",
        lambda target: (new := opened(target), modes.append(os.fstat(new.fd).st_mode & 0o777))[0],
    )
    nanscan.save(state(), path)
    assert modes[0] == modes[1] == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_owner_of_the_old_file_is_kept(tmp_path: Path) -> None:
    path = nanscan.save(state(), tmp_path / "last.pt")
    os.chown(path, 1234, 1235)
    nanscan.save(state(), path)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1235)


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "step7.pt", tmp_path / "last.pt"
    link.symlink_to(Path("data") / "step7.pt")
    nanscan.save(state(1), link)  # dangling
    nanscan.save(state(2), link)
    assert link.is_symlink() and nanscan.load(target)["step"] == 2
    assert files_in(tmp_path / "data") == ["step7.pt"] and files_in(tmp_path) == ["data", "last.pt"]


def test_another_hard_link_keeps_the_old_content(tmp_path: Path) -> None:
    path = nanscan.save(state(1), tmp_path / "last.pt")
    os.link(path, tmp_path / "kept.pt")
    nanscan.save(state(2), path)
    assert nanscan.load(tmp_path / "kept.pt")["step"] == 1 and nanscan.load(path)["step"] == 2


def test_missing_folders_are_made_and_removed_again_if_the_save_fails(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "7" / "last.pt"
    with pytest.raises(nanscan.NonFiniteError):
        nanscan.save({"w": torch.tensor(NAN)}, path)
    assert files_in(tmp_path) == []
    assert nanscan.save(state(), str(path)) == path and nanscan.load(path)["step"] == 1


@pytest.mark.parametrize("name", ["n" * 252 + ".pt", "ü" * 120 + ".pt", "a[1]*?.pt", ".hidden", "with space\n.pt"])
def test_any_name_that_the_file_system_takes_can_be_saved_to(tmp_path: Path, name: str) -> None:
    path = nanscan.save(state(), tmp_path / name)
    assert nanscan.load(nanscan.save(state(2), path))["step"] == 2 and files_in(tmp_path) == [name]


def test_leftovers_of_killed_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead, other = tmp_path / ".last.pt.99999999.0123abcd.tmp", tmp_path / ".best.pt.99999999.0123abcd.tmp"
    dead.write_bytes(b"half")
    other.write_bytes(b"half")
    mine = tmp_path / ".last.pt.notes.tmp"
    mine.write_bytes(b"a user's")
    with atomic.replacing(str(tmp_path / "last.pt")) as new:
        nanscan.save(state(), tmp_path / "last.pt")
        assert os.path.exists(new.path) and not dead.exists() and other.exists() and mine.exists()
        os.write(new.fd, b"later")
    assert (tmp_path / "last.pt").read_bytes() == b"later"


def test_a_poisoned_state_is_refused_by_path_with_the_report(tmp_path: Path) -> None:
    path = nanscan.save(state(), tmp_path / "last.pt")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["exp_avg"][1] = NAN
    bad = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": [torch.tensor([0.0, INF])]}
    with pytest.raises(nanscan.NonFiniteError) as caught:
        nanscan.save(bad, path)
    text = str(caught.value)
    assert """'optimizer["state"][1]["exp_avg"] of 'bias'' has 1 NaN, 0 Inf of 2 (first at [1])""" in text
    assert "'best[0]' has 0 NaN, 1 Inf of 2 (first at [1])" in text and "check_finite=False" in text
    assert caught.value.report is not None and caught.value.report.nan_count == 1
    assert nanscan.load(path)["step"] == 1 and files_in(tmp_path) == ["last.pt"]
    nanscan.save(bad, path, check_finite=False)
    assert torch.load(path)["best"][0][1] == INF


def test_optimizer_state_in_a_checkpoint_is_named_by_the_names_beside_it(tmp_path: Path) -> None:
    optimizer = {"state": {0: {"m": torch.tensor(NAN)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    with pytest.raises(nanscan.NonFiniteError, match="of 'fc.weight'"):
        nanscan.save({"optimizer": optimizer, "optimizer_names": [["fc.weight"]]}, tmp_path / "a.pt")


def test_where_only_running_statistics_are_bad_the_refusal_says_how_to_mend_them(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    model(torch.full((3, 2), NAN))
    with pytest.raises(nanscan.NonFiniteError, match=r"0\.running_var.*Only running statistics.*reset_running_stats"):
        nanscan.save({"model": model.state_dict()}, tmp_path / "a.pt")
    model[1].weight.data[0, 0] = NAN
    with pytest.raises(nanscan.NonFiniteError, match="go back to it"):
        nanscan.save({"model": model.state_dict()}, tmp_path / "a.pt")


def test_inf_is_allowed_where_it_is_meant_and_nan_is_not(tmp_path: Path) -> None:
    mask = torch.full((3, 3), -INF).triu(1)
    with pytest.raises(nanscan.NonFiniteError, match='check_finite="nan" if the Inf is meant'):
        nanscan.save({"mask": mask}, tmp_path / "a.pt")
    nanscan.save({"mask": mask}, tmp_path / "a.pt", check_finite="nan")
    with pytest.raises(nanscan.NonFiniteError, match="'w' has 1 NaN") as caught:
        nanscan.save({"mask": mask, "w": torch.tensor(NAN)}, tmp_path / "a.pt", check_finite="nan")
    assert "mask" not in str(caught.value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, NAN], dtype=torch.bfloat16), torch.tensor([complex(0, NAN)]),
        torch.tensor([NAN]).to_sparse(), torch.nn.Parameter(torch.tensor([NAN])),
        torch.tensor([NAN]).to(torch.float8_e4m3fn),
    ],
)  # fmt: skip
def test_a_nan_is_found_in_every_dtype_and_layout(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(nanscan.NonFiniteError, match=r"'a\[\"b\"\]\[0\]' has 1 NaN"):
        nanscan.save({"a": {"b": (tensor,)}}, tmp_path / "a.pt")


def test_what_can_not_be_scanned_does_not_hinder_the_save(tmp_path: Path) -> None:
    kept = {"ids": torch.arange(3), "none": None, "empty": torch.zeros(0), "w": torch.ones(2)}
    assert nanscan.load(nanscan.save(kept, tmp_path / "a.pt"))["ids"].tolist() == [0, 1, 2]


def test_a_tensor_without_values_is_saved_as_a_shape_with_a_warning(tmp_path: Path) -> None:
    meta = {"w": torch.ones(2), "shape": torch.empty(3, device="meta")}
    with pytest.warns(nanscan.CheckpointWarning, match="without the values of shape: on the meta device"):
        path = nanscan.save(meta, tmp_path / "a.pt")
    assert nanscan.load(path)["shape"].shape == (3,)


def test_every_value_that_would_not_load_again_is_listed(tmp_path: Path) -> None:
    path = nanscan.save(state(), tmp_path / "last.pt")
    ckpt = {"w": torch.ones(2), "args": Namespace(lr=1), "best": np.float64(3), "log": {"lock": threading.Lock()}}
    ckpt["f"] = [lambda x: x]
    with pytest.raises(nanscan.CheckpointError) as caught:
        nanscan.save(ckpt, path)
    assert [problem.path for problem in caught.value.problems] == [  # type: ignore[attr-defined]
        'ckpt["args"]', 'ckpt["best"]', 'ckpt["log"]["lock"]', 'ckpt["f"][0]',
    ]  # fmt: skip
    assert "float(x)" in str(caught.value) and "vars(x)" in str(caught.value) and "lock" in str(caught.value)
    assert nanscan.load(path)["step"] == 1 and files_in(tmp_path) == ["last.pt"]


@pytest.mark.parametrize("value", [np.float64(1), np.zeros(2), Path("x"), Namespace(a=1), frozenset({1}), range(3)])
def test_what_weights_only_refuses_is_refused_before_it_is_written(tmp_path: Path, value: object) -> None:
    torch.save({"v": value}, tmp_path / "plain.pt")
    with pytest.raises(Exception, match="weights_only"):
        torch.load(tmp_path / "plain.pt", weights_only=True)
    with pytest.raises(nanscan.CheckpointError, match=r'\["v"\]'):
        nanscan.save({"w": torch.ones(1), "v": value}, tmp_path / "a.pt")


def test_a_class_that_the_user_allowed_is_saved(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Namespace]):
        path = nanscan.save({"args": Namespace(lr=0.1), "w": torch.ones(1)}, tmp_path / "a.pt")
        assert nanscan.load(path)["args"].lr == 0.1


def test_drop_leaves_out_what_can_not_be_saved_and_names_it(tmp_path: Path) -> None:
    lock = threading.Lock()
    ckpt = {"w": torch.ones(2), "log": {"lock": lock, "n": 3}, "best": np.float32(1)}
    with pytest.warns(nanscan.CheckpointWarning, match=r'left 2 value\(s\) out(?s:.*)ckpt\["log"\]\["lock"\]'):
        path = nanscan.save(ckpt, tmp_path / "a.pt", on_unpicklable="drop")
    assert set(nanscan.load(path)) == {"w", "log"} and nanscan.load(path)["log"] == {"n": 3}
    assert ckpt["log"]["lock"] is lock  # type: ignore[index]


@pytest.mark.parametrize(("whole", "word"), [(torch.nn.Linear(2, 2), "model.state_dict()")])
def test_a_whole_model_is_refused_with_what_to_save_instead(tmp_path: Path, whole: object, word: str) -> None:
    with pytest.raises(nanscan.CheckpointError) as caught:
        nanscan.save(whole, tmp_path / "a.pt")
    assert word in str(caught.value) and files_in(tmp_path) == []


def test_nothing_is_scanned_or_written_when_pickling_fails_late(tmp_path: Path) -> None:
    class Odd:
        def __reduce__(self) -> str:
            raise ZeroDivisionError("in reduce")

    with pytest.raises(nanscan.CheckpointError, match=r'\["odd"\](?s:.*)ZeroDivisionError'):
        nanscan.save({"w": torch.tensor(NAN), "odd": Odd()}, tmp_path / "a.pt")
    assert files_in(tmp_path) == []


def test_a_save_while_the_interpreter_ends_is_complete(tmp_path: Path) -> None:
    script = f"""
        import atexit, nanscan, torch
        atexit.register(lambda: nanscan.save({{"w": torch.ones(10_000_000)}}, {str(tmp_path / "exit.pt")!r}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.stderr == "" and nanscan.load(tmp_path / "exit.pt")["w"].sum() == 10_000_000


def test_misuse_is_told() -> None:
    with pytest.raises(ValueError, match="check_finite is True, False or"):
        nanscan.save({}, "a.pt", check_finite="inf")
    with pytest.raises(ValueError, match='"raise" or "drop"'):
        nanscan.save({}, "a.pt", on_unpicklable="ignore")
