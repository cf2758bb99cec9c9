"""Every engine against the float64 reference, and the reference against what was planted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanscan.engine import Engine, reference
from nanscan.engine.result import EngineScan, Row
from tests.engine.make import COMPLEX, DTYPES, FLOAT8, REAL, Spec, make, numbers, specs, writable

EXACT = 1e-12  # relative error of a norm; float64 sums of a few million squares do better
NARROW = 2.0**-21  # up to 16 squares may be added up in float32 before they go on in float64
FLOAT64_MAX = torch.finfo(torch.float64).max  # a modulus one rounding above it is inf, and one rounding is allowed
BATCH = st.lists(specs(), min_size=8, max_size=32)


def tolerance(*tensors: Tensor) -> float:
    return NARROW if any(t.dtype in (torch.float32, torch.float16, torch.bfloat16) for t in tensors) else EXACT


def same_number(got: float, want: float, relative: float) -> bool:
    if not math.isfinite(want):
        return got == want or (math.isnan(got) and math.isnan(want))
    return abs(got - want) <= max(relative * abs(want), 1e-323)


def same_row(got: Row, want: Row, tensor: Tensor) -> bool:
    modulus = 1e-14 if tensor.is_complex() else 0.0  # a square root of two squares; else an element, exactly
    return (
        (got.position, tuple(got.also), got.nan_count, got.inf_count, got.first_bad)
        == (want.position, tuple(want.also), want.nan_count, want.inf_count, want.first_bad)
        and same_number(*(min(n, FLOAT64_MAX) if modulus else n for n in (got.inf_norm, want.inf_norm)), modulus)
        and same_number(got.finite_norm, want.finite_norm, tolerance(tensor))
    )  # fmt: skip


def check_same(got: EngineScan, want: EngineScan, tensors: list[Tensor]) -> None:
    assert [row.position for row in got.rows()] == [row.position for row in want.rows()]
    for mine, right in zip(got.rows(), want.rows(), strict=True):
        t = tensors[right.position]
        assert same_row(mine, right, t), (mine, right, t.dtype, tuple(t.shape), t.stride())
    assert [row.position for row in got.bad_rows()] == [row.position for row in want.bad_rows()]
    for name in ("finite", "nan_count", "inf_count", "numel", "count"):
        assert getattr(got, name) == getattr(want, name), name
    assert same_number(got.norm, want.norm, tolerance(*tensors)), (got.norm, want.norm)
    assert same_number(got.finite_norm, want.finite_norm, tolerance(*tensors)), (got.finite_norm, want.finite_norm)
    largest = [min(n, FLOAT64_MAX) for n in (got.inf_norm, want.inf_norm)]
    assert same_number(*largest, 1e-14), (got.inf_norm, want.inf_norm)


@given(batch=BATCH)
def test_every_engine_gives_the_reference_numbers_for_any_dtype_layout_and_magnitude(
    fast_engine: Engine, batch: list[Spec]
) -> None:
    tensors = [make(spec)[0] for spec in batch]
    check_same(fast_engine.scan(tensors), reference.scan(tensors), tensors)


@given(batch=BATCH)
def test_counts_and_first_index_are_what_was_planted(engine: Engine, batch: list[Spec]) -> None:
    made = [make(spec) for spec in batch]
    for row, (_, planted) in zip(engine.scan([t for t, _ in made]).rows(), made, strict=True):
        assert row.nan_count == sum(math.isnan(v) for v in planted.values())
        assert row.inf_count == sum(math.isinf(v) for v in planted.values())
        assert row.first_bad == min(planted, default=-1)


@given(batch=BATCH)
def test_gradients_scan_like_the_tensors_they_are(engine: Engine, batch: list[Spec]) -> None:
    tensors = [make(spec)[0].detach() for spec in batch]
    params = [torch.nn.Parameter(torch.empty_like(t), requires_grad=False) for t in tensors]
    for p, t in zip(params, tensors, strict=True):
        p.grad = t
    half = len(params) // 2
    groups = [{"params": params[:half]}, {"params": params[half:]}]
    check_same(engine.scan_grads(groups), reference.scan(tensors), tensors)


BOUNDARIES = [2**k + d for k in (8, 10, 12, 14, 16, 18) for d in (-1, 0, 1)] + [2**19 + 17]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_element_is_lost_or_read_twice_at_a_chunk_boundary(fast_engine: Engine, dtype: torch.dtype) -> None:
    tensors = []
    for count in BOUNDARIES:
        x = torch.full((count + 7,), math.nan, dtype=torch.float32).to(dtype)[3 : 3 + count]
        tensors.append(x.copy_(torch.linspace(0.5, 1.5, count, dtype=torch.float32).to(dtype)))
    check_same(fast_engine.scan(tensors), reference.scan(tensors), tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_single_bad_element_is_found_wherever_it_is(engine: Engine, dtype: torch.dtype, bad: float) -> None:
    count = 2**17 + 5
    bad = writable(bad, dtype)
    x = torch.ones(count, dtype=torch.float32).to(dtype)
    for at in (0, 1, 255, 256, 16383, 16384, 65535, 65536, 2**17 - 1, 2**17, count - 1):
        x[at] = bad
        row = engine.scan([x]).rows()[0]
        assert (row.nan_count, row.inf_count, row.first_bad) == (int(math.isnan(bad)), int(math.isinf(bad)), at)
        assert row.inf_norm == 1.0
        assert same_number(row.finite_norm, math.sqrt(count - 1), EXACT)  # of ones, in any accumulator
        x[at] = 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_bad_gives_a_finite_norm_of_zero(engine: Engine, dtype: torch.dtype) -> None:
    x = torch.full((70_001,), math.nan, dtype=torch.float32).to(dtype)
    found = engine.scan([x])
    row = found.rows()[0]
    assert (row.finite_norm, row.inf_norm, row.nan_count, row.first_bad) == (0.0, 0.0, 70_001, 0)
    assert math.isnan(found.norm) and found.finite_norm == 0.0 and not found.finite


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "sliced", "half_permuted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_first_bad_is_in_row_major_order_in_a_large_permuted_tensor(
    engine: Engine, dtype: torch.dtype, layout: str
) -> None:
    for seed in range(3):
        planted = tuple((where, math.nan) for where in np.random.default_rng(seed).uniform(0, 1, 3))
        x, at = make(Spec(dtype, layout, (17, 13, 31, 29), 0.4, 0.6, planted, seed))
        row = engine.scan([x]).rows()[0]
        assert row.first_bad == min(at)
        assert same_row(row, reference.scan([x]).rows()[0], x)


@pytest.mark.parametrize("dtype", REAL + COMPLEX, ids=str)
@pytest.mark.parametrize("position", [0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0])
def test_norm_holds_at_any_magnitude_of_the_dtype(fast_engine: Engine, dtype: torch.dtype, position: float) -> None:
    real = torch.float32 if dtype is torch.complex64 else torch.float64 if dtype is torch.complex128 else dtype
    x = numbers(50_000, real, position, position, 0)
    x = torch.view_as_complex(x.view(-1, 2)) if dtype.is_complex else x
    norm = fast_engine.scan([x]).norm
    want = reference.scan([x]).norm
    assert same_number(norm, want, tolerance(x))
    assert want > 0
    assert math.isfinite(norm) or position == 1.0 and real is torch.float64  # beyond float64 itself


def test_norm_in_total_holds_where_one_tensor_is_huge_and_one_tiny(engine: Engine) -> None:
    huge, tiny = torch.full((3,), 1e300, dtype=torch.float64), torch.full((5,), 5e-324, dtype=torch.float64)
    found = engine.scan([tiny, huge])
    assert found.norm == pytest.approx(math.sqrt(3) * 1e300, rel=1e-14)
    assert found.rows()[0].finite_norm == 2 * 5e-324 and found.inf_norm == 1e300


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_all_256_float8_codes_are_read_as_pytorch_reads_them(fast_engine: Engine, dtype: torch.dtype) -> None:
    for code in range(256):
        x = torch.full((3,), code, dtype=torch.uint8).view(dtype)
        check_same(fast_engine.scan([x]), reference.scan([x]), [x])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_65536_codes_of_a_16_bit_dtype_are_read_as_pytorch_reads_them(
    fast_engine: Engine, dtype: torch.dtype
) -> None:
    codes = torch.arange(65536).to(torch.uint16).view(dtype)
    rows = fast_engine.scan(list(codes.view(4096, 16))).rows()
    for row, want in zip(rows, reference.scan(list(codes.view(4096, 16))).rows(), strict=True):
        assert same_row(row, want, codes), (row, want)
