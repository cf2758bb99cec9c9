"""What is saved loads again: no file is written that `weights_only=True` refuses, and what is left out is said."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanscan
from tests.unpicklable import Untouchable


@pytest.mark.parametrize("value", [b"", 1 << 3000, ..., NotImplemented], ids=lambda value: str(type(value)))
def test_plain_values_that_would_not_load_are_refused_by_path_or_left_out(tmp_path: Path, value: Any) -> None:
    state = {"keep": [1, value], "lost": value}
    with pytest.raises(nanscan.CheckpointError, match=r'state\["lost"\]') as caught:
        nanscan.save(state, tmp_path / "last.pt")
    assert [problem.path for problem in caught.value.problems] == ['state["lost"]']  # type: ignore[attr-defined]
    with pytest.warns(nanscan.CheckpointWarning, match="left 1 value"):
        nanscan.save(state, tmp_path / "last.pt", on_unpicklable="drop")
    assert nanscan.load(tmp_path / "last.pt") == {"keep": [1]}


def test_what_can_not_be_left_out_is_refused_without_a_word_that_it_was(tmp_path: Path) -> None:
    with warnings.catch_warnings(), pytest.raises(nanscan.CheckpointError, match="Untouchable"):
        warnings.simplefilter("error")
        nanscan.save(Untouchable(), tmp_path / "last.pt", on_unpicklable="drop")
    assert list(tmp_path.iterdir()) == []


def test_nesting_beyond_recursion_is_refused_with_its_depth(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(3000):
        nested = [nested]
    with pytest.raises(nanscan.CheckpointError, match=r'state\["deep"\].*nested 3001 levels deep'):
        nanscan.save({"deep": nested}, tmp_path / "last.pt")


def test_an_object_that_can_not_be_touched_is_named(tmp_path: Path) -> None:
    with pytest.raises(nanscan.CheckpointError, match=r'state\["bad"\]'):
        nanscan.save({"bad": Untouchable(), "w": torch.ones(1)}, tmp_path / "last.pt")


def test_the_functions_that_a_scheduler_leaves_out_are_warned_about(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5)
    with pytest.warns(nanscan.CheckpointWarning, match=r'scheduler\["lr_lambdas"\]\[0\]') as caught:
        nanscan.save({"scheduler": scheduler.state_dict()}, tmp_path / "last.pt")
    assert caught[0].filename == __file__
