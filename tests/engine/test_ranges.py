"""`engine.measure_ranges` against plain float64 PyTorch: dtypes, layouts, sizes, magnitudes, planted NaN and Inf."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanscan.engine import RangeNumbers, active_engine
from nanscan.engine.native import NativeEngine
from nanscan.ranges import on_cpu
from tests.conftest import load_engine
from tests.engine.make import DTYPES, REAL, Spec, make, numbers, specs

NAN, INF = math.nan, math.inf
TINY = 2.0**-14
SIZES = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 255, 256, 257, 1023, 1025, 16384, 32769, 100_003)


@pytest.fixture(scope="module")
def native() -> NativeEngine:
    engine = load_engine("native")
    assert isinstance(engine, NativeEngine)
    return engine


def expected(tensor: Tensor) -> RangeNumbers:
    """The numbers, as one would write them; squares are scaled, to stay inside of float64."""
    wide = tensor.detach().to(torch.float64).reshape(-1)
    finite = wide[wide.isfinite()]
    top = float(finite.abs().max()) if finite.numel() else 0.0
    _, exponent = math.frexp(top)
    half = exponent // 2  # a power of two beyond the largest float64 has to come in two
    scaled = finite * 2.0**-half * 2.0 ** (half - exponent)
    norm = float(scaled.square().sum().sqrt())
    magnitude = wide.abs()
    return (
        wide.numel(),
        float(finite.min()) if finite.numel() else INF,
        float(finite.max()) if finite.numel() else -INF,
        _scaled(norm, exponent),
        int((wide == 0).sum()),
        int(((magnitude < TINY) & (wide != 0)).sum()),
        int(wide.isnan().sum()),
        int(wide.isinf().sum()),
        int((wide == INF).sum()),
    )


def _scaled(number: float, exponent: int) -> float:
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return INF


def check(found: RangeNumbers | None, tensor: Tensor) -> None:
    wanted = expected(tensor)
    assert found is not None
    assert found[:3] + found[4:] == wanted[:3] + wanted[4:]
    assert found[3] == pytest.approx(wanted[3], rel=5e-7, abs=1e-323)


@given(specs())
def test_native_numbers_are_those_of_plain_torch(native: NativeEngine, spec: Spec) -> None:
    tensor, _ = make(spec)
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    found = native.measure_ranges(tensor)
    served = spec.dtype in REAL and type(tensor) in (Tensor, torch.nn.Parameter)
    assert (found is not None) == served
    if served:
        check(found, tensor)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_around_a_vector_a_block_and_a_chunk(native: NativeEngine, dtype: torch.dtype, size: int) -> None:
    for offset, sign in ((0, 1.0), (1, -1.0), (3, 1.0)):  # of one sign: what pads the last block must not show
        memory = torch.full((size + 8,), NAN, dtype=dtype)
        tensor = memory[offset : offset + size].copy_(sign * numbers(size, dtype, 0.4, 0.6, size).abs())
        check(native.measure_ranges(tensor), tensor)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("span", ((0.0, 0.0), (0.0, 0.2), (0.0, 1.0), (0.9, 1.0), (1.0, 1.0)), ids=str)
def test_magnitudes_from_subnormal_to_the_largest(
    native: NativeEngine, dtype: torch.dtype, span: tuple[float, float]
) -> None:
    tensor = numbers(70_001, dtype, *span, 3)
    check(native.measure_ranges(tensor), tensor)
    tensor[::3] = 0.0
    tensor[1::50] = -0.0
    check(native.measure_ranges(tensor), tensor)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@given(
    planted=st.lists(st.tuples(st.integers(0, 70_000), st.sampled_from((NAN, INF, -INF, 0.0, -0.0))), max_size=9),
    seed=st.integers(0, 99),
)
def test_planted_values_are_counted_exactly(
    native: NativeEngine, dtype: torch.dtype, planted: list[tuple[int, float]], seed: int
) -> None:
    tensor = numbers(70_001, dtype, 0.2, 0.8, seed)
    for place, value in planted:
        tensor[place] = value
    check(native.measure_ranges(tensor), tensor)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("value", (NAN, INF, -INF, 0.0, -0.0, 2.0**-14, 2.0**-15))
def test_tensors_of_one_value(native: NativeEngine, dtype: torch.dtype, value: float) -> None:
    for size in (1, 64, 40_000):
        tensor = torch.full((size,), value, dtype=dtype)
        check(native.measure_ranges(tensor), tensor)


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_every_16_bit_pattern_and_as_many_of_the_wider_types(native: NativeEngine, dtype: torch.dtype) -> None:
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    patterns = torch.arange(-(1 << 15), 1 << 15) << 8 * dtype.itemsize - 16
    tensor = patterns.to(words).view(dtype)
    check(native.measure_ranges(tensor), tensor)


def test_expanded_and_gapped_views_count_each_element_as_often_as_it_occurs(native: NativeEngine) -> None:
    base = torch.randn(300, 70)
    base[3, 5], base[7, 7] = INF, 0.0
    for view in (base.t(), base[:, ::3], base[:, None].expand(300, 9, 70), base[0, 0].expand(4, 5), base[2:2]):
        check(native.measure_ranges(view), view)


def test_numbers_do_not_depend_on_the_number_of_threads(native: NativeEngine) -> None:
    threads = torch.get_num_threads()
    for dtype in REAL:
        tensor = numbers(1 << 20, dtype, 0.3, 0.7, 1)
        tensor[777_777] = NAN
        try:
            answers = []
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                answers.append(native.measure_ranges(tensor))
        finally:
            torch.set_num_threads(threads)
        assert answers[0] == answers[1] == answers[2]
        check(answers[0], tensor)


def test_subnormal_numbers_count_where_the_processor_flushes_them(native: NativeEngine) -> None:
    tensor = numbers(1000, torch.float32, 0.0, 0.05, 2)
    wanted = native.measure_ranges(tensor)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush")
    try:
        found = native.measure_ranges(tensor)
    finally:
        torch.set_flush_denormal(False)
    assert found == wanted and found is not None and found[4] == 0 and found[5] == 1000


@pytest.mark.parametrize("dtype", [t for t in DTYPES if t not in REAL], ids=str)
def test_other_dtypes_are_left_to_the_framework(native: NativeEngine, dtype: torch.dtype) -> None:
    assert native.measure_ranges(torch.ones(3).to(dtype)) is None


def test_freed_memory_and_other_things_are_not_served(native: NativeEngine) -> None:
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    for thing in (freed, torch.ones(2, device="meta"), torch.eye(3).to_sparse()):
        assert native.measure_ranges(thing) is None


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_a_negated_view_has_the_sign_of_its_elements(dtype: torch.dtype) -> None:
    view = torch._neg_view(torch.tensor([1.0, 2.0, -5.0], dtype=dtype))
    stats = on_cpu.measure(view, None)
    assert (stats.low, stats.high) == (-2.0, 5.0)


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_what_numpy_says_is_the_same(native: NativeEngine, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = numbers(5000, dtype, 0.3, 0.7, 5)
    for value in (0.0, NAN, INF, -INF):
        tensor[17] = value
        fast = on_cpu.measure(tensor, None)
        with monkeypatch.context() as patch:
            patch.setattr(active_engine(), "measure_ranges", lambda tensor: None)
            slow = on_cpu.measure(tensor, None)
        assert fast._replace(norm=0.0) == slow._replace(norm=0.0)
        assert fast.norm == pytest.approx(slow.norm, rel=1e-6)
