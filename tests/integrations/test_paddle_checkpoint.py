"""Paddle's states are saved in one moment, in Paddle's own format, verified, and read by `paddle.load` as they are."""

from __future__ import annotations

import errno
import os
import pickle
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import torch

import nanscan

NAN = float("nan")


def trained() -> tuple[Any, Any]:
    """A model with a tensor that pickle writes by itself and several small ones, and its optimizer after a step."""
    paddle.seed(0)
    layer = paddle.nn.Sequential(paddle.nn.Linear(130, 140), paddle.nn.BatchNorm1D(140), paddle.nn.Linear(140, 2))
    schedule = paddle.optimizer.lr.StepDecay(0.1, 2)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=layer.parameters(), multi_precision=True)
    layer(paddle.randn([4, 130])).mean().backward()
    optimizer.step()
    return layer, optimizer


def states() -> dict[str, Any]:
    layer, optimizer = trained()
    nested = {
        "model": layer.state_dict(),
        "optimizer": {"state": optimizer.state_dict(), "lr": 0.1},
        "half": [paddle.ones([3]).astype("bfloat16"), paddle.to_tensor([1, 2])],
        "array": np.arange(3.0),
        "epoch": 3,
        "tied": layer[0].weight,
        "note": None,
    }
    return {"w.pdparams": layer.state_dict(), "o.pdopt": optimizer.state_dict(), "all.pdtensors": nested}


@pytest.mark.parametrize("name", ["w.pdparams", "o.pdopt", "all.pdtensors"])
def test_a_state_comes_back_with_and_without_nanscan(tmp_path: Path, name: str) -> None:
    state = states()[name]
    path = nanscan.save(state, tmp_path / "new" / name)
    paddle.save(state, str(tmp_path / name))
    plain = paddle.load(str(tmp_path / name))
    assert path.read_bytes().startswith((tmp_path / name).read_bytes())  # it is Paddle's file, and more behind it
    for loaded in (nanscan.load(path), paddle.load(str(path)), nanscan.load(tmp_path / name)):
        assert repr(loaded) == repr(plain)
    assert os.listdir(tmp_path / "new") == [name]


def test_training_goes_on_from_a_loaded_state(tmp_path: Path) -> None:
    layer, optimizer = trained()
    nanscan.save(layer.state_dict(), tmp_path / "m.pdparams")
    nanscan.save(optimizer.state_dict(), tmp_path / "m.pdopt")
    again, other = trained()
    with paddle.no_grad():
        for weight in again.parameters():
            weight.set_value(weight * 0)
    again.set_state_dict(nanscan.load(tmp_path / "m.pdparams"))
    state = nanscan.load(tmp_path / "m.pdopt", map_location="cpu")
    assert state["LR_Scheduler"] == optimizer.state_dict()["LR_Scheduler"]
    renamed = dict(zip([p.name for p in layer.parameters()], [p.name for p in again.parameters()], strict=True))
    other.set_state_dict({_renamed(key, renamed): value for key, value in state.items()})
    for model, steps in ((layer, optimizer), (again, other)):
        steps.clear_grad()
        model(paddle.ones([4, 130])).sum().backward()
        steps.step()
    for one, two in zip(layer.parameters(), again.parameters(), strict=True):
        assert np.array_equal(one.numpy(), two.numpy())


def _renamed(key: str, names: dict[str, str]) -> str:
    own = next((name for name in names if key.startswith(name + "_")), None)
    return key if own is None else names[own] + key[len(own) :]


@pytest.mark.parametrize("name", ["w.pdparams", "all.pdtensors"])
def test_every_flipped_bit_and_every_cut_is_found(tmp_path: Path, name: str) -> None:
    path = nanscan.save(states()[name], tmp_path / name)
    whole, chance = path.read_bytes(), random.Random(0)
    places = [chance.randrange(len(whole)) for _ in range(60)] + [0, len(whole) - 1, len(whole) - 40, len(whole) - 60]
    for at in places:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(nanscan.CorruptCheckpoint, match="corrupt"):
            nanscan.load(path)
    for left in (0, 1, 50, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        path.write_bytes(whole[:left])
        with pytest.raises(nanscan.CorruptCheckpoint):
            nanscan.load(path)
    path.write_bytes(whole + b"\0" * 9)
    with pytest.raises(nanscan.CorruptCheckpoint, match="9 bytes after its end"):
        nanscan.load(path)


@pytest.mark.parametrize(("tensor", "path"), [("0.weight", 'model["0.weight"]'), ("2.bias", 'model["2.bias"]')])
def test_the_damaged_tensor_is_named(tmp_path: Path, tensor: str, path: str) -> None:
    layer, _ = trained()
    layer[2].bias.set_value(paddle.to_tensor([0.123456, -7.5]))
    file = nanscan.save({"model": layer.state_dict(), "epoch": 3}, tmp_path / "m.pdparams")
    whole = bytearray(file.read_bytes())
    whole[whole.index(layer.state_dict()[tensor].numpy().tobytes()) + 5] ^= 4
    file.write_bytes(whole)
    with pytest.raises(nanscan.CorruptCheckpoint) as caught:
        nanscan.load(file)
    assert f"the bytes of tensor {path} are not those that were saved" in str(caught.value)
    assert nanscan.load(file, verify=False)["epoch"] == 3


@pytest.mark.parametrize("bad", ["tensor", "array", "float8"])
def test_a_state_with_a_nan_is_refused_by_name_and_the_old_file_stays(tmp_path: Path, bad: str) -> None:
    path = nanscan.save({"w": paddle.ones([2])}, tmp_path / "m.pdparams")
    before = path.read_bytes()
    value = {"tensor": paddle.to_tensor([1.0, NAN]), "array": np.array([1.0, NAN]), "float8": None}[bad]
    if value is None:
        value = paddle.to_tensor([1.0, NAN]).astype("float8_e4m3fn")
        with pytest.raises(nanscan.CheckpointError, match=r"float8_e4m3fn; save x.astype\('bfloat16'\)"):
            nanscan.save({"net": {"w": value}}, path)
    else:
        with pytest.raises(nanscan.NonFiniteError, match=r"'net\[\"w\"\]' has 1 NaN, 0 Inf of 2 \(first at \[1\]\)"):
            nanscan.save({"net": {"w": value}}, path)
        nanscan.save({"net": {"w": value}}, tmp_path / "other.pdparams", check_finite=False)
    assert path.read_bytes() == before and len(os.listdir(tmp_path)) == 1 + (bad != "float8")


def test_a_save_that_the_system_refuses_leaves_the_old_file(tmp_path: Path) -> None:
    path = nanscan.save({"w": paddle.ones([2])}, tmp_path / "m.pdparams")
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(nanscan.CheckpointSystemError) as caught:
            nanscan.save({"w": paddle.ones([100, 1000])}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m.pdparams"]


UNFIT: dict[str, tuple[Callable[[], Any], str]] = {
    'state["net"]': (lambda: paddle.nn.Linear(1, 1), "state_dict()"),
    'state["optimizer"]': (lambda: paddle.optimizer.SGD(parameters=[]), "state_dict()"),
    'state["f"]': (lambda: lambda x: x, "no function"),
    'state["raw"]': (lambda: b"abc", "no bytes"),
    'state["torch"]': (lambda: torch.ones(2), "as .pt"),
    'state["pair"]': (lambda: ("name", np.ones(2)), "takes a pair of text and array for a tensor"),
    'state["numpy_rng"][1]': (lambda: np.random.get_state(), "none of uint32; save x.astype('int64')"),
    'state["names"]': (lambda: np.array(["a", "b"]), "save x.tolist()"),
    'state["sparse"]': (lambda: paddle.sparse.sparse_coo_tensor([[0], [1]], [1.0], [2, 2]), "to_dense()"),
}


def test_what_does_not_fit_is_listed_with_its_path_or_left_out(tmp_path: Path) -> None:
    state = {key.split('"')[1]: make() for key, (make, _) in UNFIT.items()} | {"w": paddle.ones([2]), "n": [1, set()]}
    with pytest.raises(nanscan.CheckpointError) as caught:
        nanscan.save(state, tmp_path / "m.pdparams")
    problems = {problem.path: problem for problem in caught.value.problems}
    assert problems.keys() == UNFIT.keys()
    assert all(words in problems[path].describe() for path, (_, words) in UNFIT.items())
    with pytest.warns(nanscan.CheckpointWarning, match="left 9 value"):
        nanscan.save(state, tmp_path / "m.pdparams", on_unpicklable="drop")
    assert nanscan.load(tmp_path / "m.pdparams").keys() == {"w", "n", "numpy_rng"}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".h5"])
def test_other_formats_refuse_paddle_tensors_and_say_which_suffix(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(nanscan.CheckpointError, match=r'net\["w"\] are tensors of PaddlePaddle. .*\.pdparams'):
        nanscan.save({"net": {"w": paddle.ones([2])}}, tmp_path / f"m{suffix}")
    for whole in (paddle.nn.Linear(1, 1), trained()[1]):
        with pytest.raises(nanscan.CheckpointError, match=r"a whole (layer|optimizer) .*Save its state: .*state_dict"):
            nanscan.save(whole, tmp_path / f"m{suffix}")
    assert os.listdir(tmp_path) == []


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch RAN",)


def test_a_file_that_would_run_code_is_refused_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.pdparams").write_bytes(pickle.dumps({"w": 1, "x": Bomb()}, 4))
    with pytest.raises(nanscan.CheckpointError, match=r"holds posix\.system, which weights_only=True refuses"):
        nanscan.load("m.pdparams")
    assert not (tmp_path / "RAN").exists()


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(nanscan.CheckpointSystemError, match="no such file"):
        nanscan.load(tmp_path / "none.pdparams")
