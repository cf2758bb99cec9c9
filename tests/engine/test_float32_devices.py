"""The eager engine on a device without float64 (MPS, some XPU), played by the CPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanscan.engine import eager, measure, reference
from tests.engine.make import Spec, make, specs
from tests.engine.test_apply import group

NARROW = st.lists(specs().filter(lambda s: s.dtype not in (torch.float64, torch.complex128)), min_size=4, max_size=16)


@pytest.fixture(scope="module", autouse=True)
def float32_only() -> object:
    """Takes float64 away from the eager engine."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (measure, eager):
            patch.setattr(module, "wide_dtype", lambda device: torch.float32)
        patch.setattr(eager, "_SMALL", 0)  # the quick norms of small CPU tensors are float64
        yield


def close(got: float, want: float) -> bool:
    return abs(got - want) <= max(1e-6 * want, 3e-45)


@given(batch=NARROW)
def test_norms_hold_to_1e_6_at_any_magnitude_without_float64(batch: list[Spec]) -> None:
    tensors = [make(spec)[0] for spec in batch]
    groups = group(*[t.detach() for t in tensors])
    deferred = eager.launch_grads(groups, clip_norm=1.0).result()
    for found in (eager.scan(tensors), deferred):
        for row, want in zip(found.rows(), reference.scan(tensors).rows(), strict=True):
            assert (row.nan_count, row.inf_count, row.first_bad) == (want.nan_count, want.inf_count, want.first_bad)
            assert close(row.finite_norm, want.finite_norm) and close(row.inf_norm, want.inf_norm), (row, want)


def test_long_sums_keep_their_digits_in_float32() -> None:
    t = torch.rand(500_001) + 0.5
    assert close(eager.scan([t]).norm, reference.scan([t]).norm)


def test_wide_dtype_asks_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = _unpatched()
    asked = []
    ones = torch.ones

    def no_float64(*size: int, **kwargs: object) -> torch.Tensor:
        asked.append(kwargs["dtype"])
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    assert fresh.wide_dtype(torch.device("cpu")) is torch.float64
    monkeypatch.setattr(torch, "ones", no_float64)
    assert [fresh.wide_dtype(torch.device("meta")) for _ in range(3)] == [torch.float32] * 3
    assert asked == [torch.float64]
    monkeypatch.setattr(torch, "ones", ones)


def _unpatched() -> ModuleType:
    import importlib.util

    spec = importlib.util.find_spec("nanscan.engine.measure")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
