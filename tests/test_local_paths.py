"""Paths with `~` and URLs are refused before a folder of that name is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nanscan

STATE = {"w": torch.ones(2)}
TAKERS: dict[str, Callable[[Any], Any]] = {
    "save": lambda path: nanscan.save(STATE, path),
    "load": nanscan.load,
    "manager": nanscan.CheckpointManager,
    "watch": lambda path: nanscan.watch(torch.nn.Linear(1, 1), log=path),
    "log": lambda path: nanscan.wrap(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), log=path),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("~/runs/last.pt", "os.path.expanduser('~/runs/last.pt')"),
        (Path("~/last.pt"), "a folder called '~'"),
        ("s3://bucket/last.pt", "a URL"),
        (Path("gs://bucket/last.pt"), "a URL"),
    ],
)
def test_another_place_than_a_local_path_is_refused_in_words(taker: str, path: Any, words: str, here: Path) -> None:
    with pytest.raises(ValueError, match="is '") as refused:
        TAKERS[taker](path)
    assert words in str(refused.value) and repr(os.fspath(path)) in str(refused.value)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("path", ["~tilde.pt", "a~/x.pt", "run:1/x.pt", "~/x.pt"])
def test_a_name_that_only_looks_like_one_is_taken(path: str, here: Path) -> None:
    if path.startswith("~/"):
        Path("~").mkdir()  # somebody has such a folder
    assert nanscan.load(nanscan.save(STATE, path))["w"].sum() == 2
    assert (here / path).is_file()
