"""Tensors that exist while an object is pickled only: a started process does not find their shared memory any more."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from nanscan import find_unpicklable

KEPT = torch.ones(4)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere tensors are not sent by open files")


class Copies:
    def __init__(self) -> None:
        self.w = torch.ones(4)

    def __getstate__(self) -> dict[str, Any]:
        return {"w": self.w.clone()}


class GivesKept:
    def __reduce__(self) -> Any:
        return GivesKept, (), {"w": KEPT}


class Plain:
    def __init__(self) -> None:
        self.w = torch.ones(4)


def arrives(value: Any) -> bool:
    """Whether a started process gets the value."""
    process = torch.multiprocessing.get_context("spawn").Process(target=id, args=(value,))
    process.start()
    process.join()
    return process.exitcode == 0


def test_a_generator_does_not_reach_a_started_process(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = {"seed": torch.Generator()}
    (problem,) = find_unpicklable(arguments, name="x", for_process=True)
    assert problem.path == 'x["seed"]' and "makes a new tensor" in problem.reason and "keep the seed" in problem.fix
    assert find_unpicklable(arguments) == []
    assert not arrives(arguments) and "unable to resize file" in capfd.readouterr().err


@pytest.mark.parametrize(("kind", "found"), [(Copies, 1), (GivesKept, 0), (Plain, 0)])
def test_only_what_nobody_else_holds_is_lost(kind: Any, found: int) -> None:
    value = kind()
    assert len(find_unpicklable([value], for_process=True)) == found
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        assert find_unpicklable([value], for_process=True) == []
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
