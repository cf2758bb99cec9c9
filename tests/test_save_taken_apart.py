"""Plain tensors are taken apart for pickling as torch takes them apart; all others are left to torch."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanscan
from nanscan.checkpoint import taken_apart
from nanscan.checkpoint.picklable import PickleWatch


class Subclass(torch.Tensor):
    pass


def with_attribute() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.note = 1  # type: ignore[attr-defined]
    return tensor


def with_hook() -> torch.Tensor:
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(lambda gradient: gradient)
    return tensor


BASE = torch.arange(24.0).reshape(4, 6)
KINDS: dict[str, Callable[[], Any]] = {
    "dtypes taken apart": lambda: [torch.ones(3, dtype=dtype) for dtype in sorted(taken_apart._DTYPES, key=str)],
    "other dtypes": lambda: [torch.zeros(3).to(t) for t in (torch.complex64, torch.uint16, torch.float8_e5m2)],
    "views": lambda: [BASE, BASE.T, BASE[1:, ::2], BASE[3, 5], BASE.expand(2, 4, 6), BASE.view(-1)],
    "empty": lambda: [torch.empty(0), torch.empty(3, 0, 2), torch.tensor(1.0)],
    "needs grad": lambda: [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2],
    "twice": lambda: [BASE, BASE],
    "parameters": lambda: [nn.Parameter(BASE), nn.Parameter(BASE, requires_grad=False), nn.Buffer(BASE)],
    "lazy": lambda: [torch.ones(2, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(2))],
    "part of a conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "sparse": lambda: BASE.to_sparse(),
    "csr": lambda: BASE.to_sparse_csr(),
    "meta": lambda: torch.ones(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(BASE, 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "subclass": lambda: torch.ones(2).as_subclass(Subclass),
    "attribute": with_attribute,
    "hook": with_hook,
    "state dict": lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict(),
    "ordered": lambda: OrderedDict(a=BASE),
}


def pickled(value: Any, module: Any) -> bytes:
    """The pickle inside the archive that torch makes of a value."""
    file = io.BytesIO()
    torch.save(value, file, pickle_module=module)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_the_pickle_is_torchs_own_byte_for_byte(kind: str) -> None:
    state = {"value": KINDS[kind]()}
    assert pickled(state, PickleWatch().module) == pickled(state, pickle)


@pytest.mark.filterwarnings("ignore:backward hook")
def test_plain_tensors_are_not_asked_and_all_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = torch.Tensor.__reduce_ex__
    monkeypatch.setattr(
        torch.Tensor, "__reduce_ex__", lambda self, version: (asked.append(id(self)), original(self, version))[1]
    )
    state = {"plain": torch.ones(3), "lazy": torch._neg_view(torch.ones(2)), "hook": with_hook()}
    pickled(state, PickleWatch().module)
    assert asked == [id(state["lazy"]), id(state["hook"])]


def test_where_torch_does_it_in_another_way_torch_does_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = torch.Tensor.__reduce_ex__

    def with_one_more_part(self: torch.Tensor, version: Any) -> Any:
        rebuild, parts = original(self, version)
        return rebuild, (*parts, {})

    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", with_one_more_part)
    taken_apart._is_torchs_way.cache_clear()
    try:
        weight = torch.ones(3)
        assert taken_apart.taken_apart(weight, weight.untyped_storage()) is None
        assert torch.equal(nanscan.load(nanscan.save({"w": weight}, tmp_path / "w.pt"))["w"], weight)
    finally:
        taken_apart._is_torchs_way.cache_clear()
    monkeypatch.undo()
    assert taken_apart.taken_apart(weight, weight.untyped_storage()) is not None


def test_dimensions_with_names_are_left_to_torch_where_it_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    named, other = torch.ones(3), torch.ones(3)
    monkeypatch.setattr(taken_apart, "_has_names", lambda tensor: tensor is named)
    assert taken_apart.taken_apart(named, named.untyped_storage()) is None
    assert taken_apart.taken_apart(other, other.untyped_storage()) is not None
