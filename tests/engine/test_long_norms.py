"""Norms of tensors long enough for the native engine's fast loops, at every magnitude, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from nanscan.engine import Engine

BOUND = {torch.float32: 2.7e-7, torch.bfloat16: 4.8e-7, torch.float16: 4.8e-7, torch.float64: 1e-12}
MAGNITUDES = [1e-45, 1e-38, 1e-25, 1e-19, 1e-13, 1e-12, 1e-7, 0.1, 1.0, 1e3, 6e4, 1e17, 1e18, 1e19, 1e30, 3e38]


def largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def exact_norm(t: torch.Tensor) -> float:
    wide = t.double()
    top = wide.abs().max().item()
    return math.sqrt((wide / top).square().sum().item()) * top if top else 0.0


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("count", [257, 1000, 16_384, 100_003])
def test_norm_keeps_its_bound_at_every_magnitude(engine: Engine, dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    shape = torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1
    for magnitude in MAGNITUDES:
        if magnitude > largest(dtype):
            continue
        for values in (shape, torch.full((count,), 1 / 3, dtype=torch.float64)):  # equal ones round the same way
            t = (values * magnitude).to(dtype)
            want = exact_norm(t)
            got = engine.scan([t])
            assert got.finite
            assert abs(got.norm - want) <= BOUND[dtype] * want, (magnitude, got.norm, want)
            assert got.inf_norm == t.abs().max().item()


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_small_elements_beside_large_ones_keep_the_bound(engine: Engine, dtype: torch.dtype) -> None:
    t = torch.full((50_000,), 1e-4, dtype=dtype)
    t[7] = 100.0
    t[40_000:] = 0.0
    want = exact_norm(t)
    assert abs(engine.scan([t]).norm - want) <= BOUND[dtype] * want


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_one_bad_element_leaves_the_norm_of_the_others(engine: Engine, dtype: torch.dtype, bad: float) -> None:
    t = torch.linspace(-1, 1, 40_001, dtype=torch.float64).to(dtype)
    healthy = t.clone()
    healthy[33_333] = 0.0
    t[33_333] = bad
    found = engine.scan([t])
    want = exact_norm(healthy)
    assert (found.nan_count, found.inf_count) == ((1, 0) if math.isnan(bad) else (0, 1))
    assert found.bad_rows()[0].first_bad == 33_333
    assert abs(found.finite_norm - want) <= BOUND[dtype] * want


def test_largest_magnitude_of_many_float32_is_exact_to_the_last_bit(engine: Engine) -> None:
    dice = torch.Generator().manual_seed(0)
    for exponent in range(-149, 128):
        t = ((1 + torch.rand(500, generator=dice, dtype=torch.float64)) * 2.0**exponent).float()
        t[exponent] *= -1
        assert engine.scan([t]).inf_norm == t.abs().max().item(), exponent


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000], ids=hex)
@pytest.mark.parametrize("others", [0.0, 1e-44, 1e-30, 1.0, 3e38])
def test_nan_of_either_sign_and_inf_are_found_among_many(engine: Engine, others: float, bits: int) -> None:
    t = torch.full((1000,), others)
    t.view(torch.int32)[777] = bits - (1 << 32) if bits >> 31 else bits
    scan, infinite = engine.scan([t]), bits & 0x7FFFFFFF == 0x7F800000
    assert (scan.nan_count, scan.inf_count) == ((0, 1) if infinite else (1, 0))
    assert scan.rows()[0].first_bad == 777
    assert scan.inf_norm == t[0].item()
