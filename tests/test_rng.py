"""The random state goes to a file and comes back, whole or not at all."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanscan.errors import CheckpointError, CheckpointWarning
from nanscan.rng import rng_state, set_rng_state


def draw() -> list[float]:
    """A few numbers of each generator; the Gaussian ones leave a spare behind, which is state too."""
    python = [random.random(), random.gauss(0, 1)]
    numpy = [float(np.random.rand()), float(np.random.randn()), float(np.random.standard_normal())]
    return [*python, *numpy, *torch.rand(3).tolist(), *torch.randperm(5).tolist()]


@pytest.fixture(autouse=True)
def leave_generators_alone() -> Any:
    before = rng_state()
    yield
    set_rng_state(before)


@pytest.mark.parametrize("draws_before", [0, 1, 7])
def test_every_generator_repeats_after_restoring(draws_before: int) -> None:
    for _ in range(draws_before):
        draw()
    state = rng_state()
    first = [draw(), draw()]
    set_rng_state(state)
    assert [draw(), draw()] == first


def test_state_survives_a_file_that_is_loaded_without_running_code(tmp_path: Path) -> None:
    random.gauss(0, 1)
    np.random.randn()
    state = rng_state()
    first = draw()
    torch.save(state, tmp_path / "rng.pt")
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draw() == first


def test_state_is_a_copy_that_later_draws_do_not_change() -> None:
    state = rng_state()
    first = draw()
    draw()
    set_rng_state(state)
    assert draw() == first


def test_part_that_is_not_there_is_left_alone() -> None:
    state = rng_state()
    first = draw()
    set_rng_state({"torch": state["torch"]})
    again = draw()
    assert again[:5] != first[:5] and again[5:] == first[5:]


@pytest.mark.parametrize("part", ["python", "numpy", "torch"])
@pytest.mark.parametrize("broken", [None, 7, {}, torch.zeros(3)], ids=["None", "int", "dict", "tensor"])
def test_malformed_part_is_refused_and_nothing_is_half_restored(part: str, broken: object) -> None:
    state = rng_state()
    draw()
    before = rng_state()
    expected = draw()
    set_rng_state(before)
    with pytest.raises(CheckpointError, match=r"random number generators can't be restored.*rng_state\(\)"):
        set_rng_state({**state, part: broken})
    assert draw() == expected


def test_changed_number_of_cuda_devices_is_warned_about_and_the_rest_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: restored.append(index))
    state = {**rng_state(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * 4}
    first = draw()
    with pytest.warns(CheckpointWarning, match=r"4 CUDA devices was saved, and there are 2 here: 2 restored"):
        set_rng_state(state)
    assert restored == [0, 1] and draw() == first


@pytest.mark.cuda
def test_cuda_generators_repeat_after_restoring() -> None:
    torch.rand(1, device="cuda")
    state = rng_state()
    first = torch.rand(4, device="cuda").tolist()
    set_rng_state(state)
    assert torch.rand(4, device="cuda").tolist() == first
