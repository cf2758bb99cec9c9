"""What can not be loaded here is named with its place in the saved object, and nothing runs to find it."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pathlib
import pickle
import re
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nanscan
from nanscan.pickling.where import needs_of


class Runs:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_refused_name_comes_with_its_place(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "metrics": {"best": [0.5, np.float64(1)]}, "args": argparse.Namespace(lr=0.1)}
    torch.save(state, tmp_path / "last.pt")
    with pytest.raises(nanscan.CheckpointError) as caught:
        nanscan.load(tmp_path / "last.pt")
    assert 'state["metrics"]["best"][1]' in str(caught.value) and 'state["args"]' in str(caught.value)
    assert "argparse.Namespace" in str(caught.value) and "and 0 more" not in str(caught.value)


def test_an_opcode_that_the_loader_does_not_know_is_named(tmp_path: Path) -> None:
    torch.save({"n": 1 << 3000}, tmp_path / "last.pt")
    with pytest.raises(nanscan.CheckpointError, match="does not know the opcode LONG4"):
        nanscan.load(tmp_path / "last.pt")


@pytest.mark.parametrize("protocol", range(6))
def test_places_are_found_in_every_protocol_and_nothing_runs(tmp_path: Path, protocol: int) -> None:
    state = {
        "e": [Runs(tmp_path / "it ran")],
        ("k", 1): collections.OrderedDict(p=pathlib.PurePosixPath("x")),
        "ns": argparse.Namespace(when=np.datetime64("2026-01-01")),
        "dd": collections.defaultdict(list, key=[collections.Counter("ab")]),
    }
    found = needs_of(io.BytesIO(pickle.dumps(state, protocol=protocol)), "state").places
    assert found[f"{os.name}.mkdir"] == 'state["e"][0]'
    assert found["pathlib.PurePosixPath"] == 'state[("k", 1)]["p"]'
    assert found["argparse.Namespace"] == 'state["ns"]'
    assert any(path == 'state["ns"].when' for path in found.values())
    assert found["collections.Counter"] == 'state["dd"]["key"][0]'
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_holds_itself_ends() -> None:
    state: dict[str, Any] = {"n": argparse.Namespace()}
    state["self"], state["n"].back = state, state
    assert needs_of(io.BytesIO(pickle.dumps(state)), "state").places == {"argparse.Namespace": 'state["n"]'}


def test_a_class_that_has_moved_or_gone_is_named_with_its_place_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`weights_only=False` imports classes; PyTorch then says their name alone."""
    module = types.ModuleType("net_of_before")
    module.Net = type("Net", (torch.nn.Linear,), {"__module__": "net_of_before"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "net_of_before", module)
    torch.save({"ema": [module.Net(2, 2)]}, tmp_path / "last.pt")  # type: ignore[attr-defined]
    del module.Net  # type: ignore[attr-defined]
    for words in (r"Can't get attribute 'Net'", "No module named 'net_of_before'"):
        with pytest.raises(nanscan.CheckpointError, match=words) as caught:
            nanscan.load(tmp_path / "last.pt", weights_only=False)
        assert 'last.pt\' holds net_of_before.Net (at state["ema"][0])' in str(caught.value)
        assert "sys.modules['net_of_before'] = " in str(caught.value) and "state_dict()" in str(caught.value)
        monkeypatch.delitem(sys.modules, "net_of_before", raising=False)


class Elsewhere:
    """Pickles as the path of a system that is not this one."""

    def __reduce__(self) -> Any:
        return pathlib.Path, ("runs", "7")


def renamed(old: Path, new: Path, name: bytes, other: bytes) -> Path:
    with zipfile.ZipFile(old) as source, zipfile.ZipFile(new, "w") as target:
        for member in source.namelist():
            target.writestr(member, source.read(member).replace(name, other))
    return new


def test_a_path_of_another_system_is_named_and_the_advice_loads_it(tmp_path: Path) -> None:
    torch.save({"out": [Elsewhere()], "w": torch.ones(2)}, tmp_path / "here.pt")
    file = renamed(tmp_path / "here.pt", tmp_path / "last.pt", b"pathlib\nPath\n", b"pathlib\nWindowsPath\n")
    with pytest.raises(nanscan.CheckpointError, match=r"of another operating system.*\(at state\[\"out\"\]\[0\]\)"):
        nanscan.load(file, weights_only=False)
    with pytest.raises(nanscan.CheckpointError) as caught:
        nanscan.load(file)
    (advice,) = re.findall(r"add_safe_globals\((\[.*?\])\)", str(caught.value))
    with torch.serialization.safe_globals(eval(advice)):
        assert nanscan.load(file)["out"][0] == pathlib.PureWindowsPath("runs/7")


def test_a_class_that_is_gone_is_allowed_as_what_has_become_of_it(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=0.1)}, tmp_path / "here.pt")
    file = renamed(tmp_path / "here.pt", tmp_path / "last.pt", b"argparse\nNamespace", b"gone_pkg\nNamespace")
    with pytest.raises(nanscan.CheckpointError, match=r"gone_pkg.Namespace can't be imported here") as caught:
        nanscan.load(file)
    assert "(new.Namespace, 'gone_pkg.Namespace')" in str(caught.value)
    with torch.serialization.safe_globals([(argparse.Namespace, "gone_pkg.Namespace")]):
        assert nanscan.load(file)["args"].lr == 0.1
    with pytest.raises(nanscan.CheckpointError) as found:  # what is there needs no such words
        nanscan.load(tmp_path / "here.pt")
    assert "can't be imported" not in str(found.value)


def test_a_file_of_another_device_says_how_to_load_it_here(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3.0)}, tmp_path / "cpu.pt")
    with zipfile.ZipFile(tmp_path / "cpu.pt") as old, zipfile.ZipFile(tmp_path / "last.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"X\x03\0\0\0cpu", b"X\x07\0\0\0cuda:99"))
    with pytest.raises(nanscan.CheckpointError, match=r"last\.pt' holds tensors of a device .*CUDA") as caught:
        nanscan.load(tmp_path / "last.pt")
    assert "map_location='cpu'" in str(caught.value)
    assert torch.equal(nanscan.load(tmp_path / "last.pt", map_location="cpu")["w"], torch.arange(3.0))


REFUSED: dict[str, Any] = {
    "number": np.float64(0.5),
    "array": np.zeros(2, dtype="f4"),
    "fields": np.zeros(1, dtype=[("a", "f4")]),
    "random state": np.random.RandomState(0),
    "generator": np.random.default_rng(0),
    "optimizer": torch.optim.SGD([torch.ones(1)], lr=0.1),
    "path": pathlib.PurePosixPath("x"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_advice_on_what_to_allow_is_all_that_it_takes(tmp_path: Path, kind: str) -> None:
    torch.save({"v": REFUSED[kind]}, tmp_path / "a.pt")
    with pytest.raises(nanscan.CheckpointError) as caught:
        nanscan.load(tmp_path / "a.pt")
    advised = re.search(r"add_safe_globals\((\[.*?\])\)", str(caught.value))
    assert advised is not None and 'state["v"]' in str(caught.value)
    with torch.serialization.safe_globals(eval(advised[1], dict(sys.modules))):
        assert type(nanscan.load(tmp_path / "a.pt")["v"]) is type(REFUSED[kind])


def test_what_no_allowlist_helps_with_is_not_advised_to_be_allowed(tmp_path: Path) -> None:
    torch.save({"v": collections.deque([1])}, tmp_path / "a.pt")
    with pytest.raises(nanscan.CheckpointError, match=r"collections\.deque") as caught:
        nanscan.load(tmp_path / "a.pt")
    assert "add_safe_globals" not in str(caught.value)


def test_a_class_that_only_the_loader_names_is_what_is_to_be_allowed(tmp_path: Path) -> None:
    torch.save({"v": np.float64(0.5)}, tmp_path / "a.pt")
    content = torch.serialization.safe_globals([np.dtype, np._core.multiarray.scalar])
    with content, pytest.raises(nanscan.CheckpointError, match=r"add_safe_globals\(\[numpy\.dtypes\.Float64DType\]\)"):
        nanscan.load(tmp_path / "a.pt")
