"""Fast and light: no tensor's data is read or copied, and what does not need loading starts nothing."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanscan import find_unpicklable

_GENEROUS = 8  # the bound is 1 s on a quiet machine; the tests' machine may be anything but


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def model() -> Any:
    """1,000 modules, 1 GB of weights (mapped, never touched)."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(250)]
    with torch.device("meta"):
        large = nn.Linear(15_000, 17_000, bias=False)
    return nn.Sequential(*blocks, large.to_empty(device="cpu"))


@pytest.mark.parametrize("options", [{}, {"for_process": True}, {"weights_only": True}], ids=str)
def test_a_thousand_modules_and_a_gigabyte_take_a_second_and_fifty_megabytes(
    model: Any, options: dict[str, Any]
) -> None:
    assert sum(1 for _ in model.modules()) > 1_000
    assert sum(p.numel() * p.element_size() for p in model.parameters()) > 1e9
    obj = model.state_dict() if options.get("weights_only") else model
    find_unpicklable(nn.Linear(1, 1), **options)  # imports
    before, start = _resident(), time.perf_counter()
    assert find_unpicklable(obj, **options) == []
    assert time.perf_counter() - start < 1.0 * _GENEROUS
    assert _resident() - before < 50e6
    tracemalloc.start()
    find_unpicklable(obj, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6


def test_large_arrays_are_not_copied() -> None:
    import numpy as np

    state = {"x": np.zeros(30_000_000), "strided": np.zeros((2, 30_000_000)).T}
    tracemalloc.start()
    assert find_unpicklable(state) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6
