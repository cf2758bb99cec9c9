"""Every column of a range row against plain PyTorch, over dtypes, layouts and planted values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanscan
from nanscan.engine import active_engine
from nanscan.ranges import on_cpu, on_device
from tests.conftest import load_engine

NAN, INF = math.nan, math.inf
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PLANTED: dict[str, list[float]] = {
    "healthy": [],
    "zeros of both signs": [0.0, -0.0, 0.0],
    "subnormal in float16": [3e-5, -3e-5, 1e-7],
    "at the edge of what is tiny": [2.0**-14, -(2.0**-14) * (1 - 2.0**-24), 2.0**-14 * (1 + 2.0**-23)],
    "too small to have a square": [1e-30, -1e-40, 1e-45],
    "NaN": [NAN, NAN],
    "both Inf": [INF, -INF, -INF],
    "NaN and Inf": [NAN, INF],
}


class Returns(nn.Module):
    """Returns what it is told to, whatever it gets."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output


def seen(output: Any, **options: Any) -> nanscan.RangeRow:
    """The row of a module that returns `output`."""
    model = Returns(output)
    with nanscan.watch(model, **options) as ranges:
        model(torch.ones(1))
    (row,) = ranges.rows()
    return row


def expected(tensor: Tensor) -> dict[str, float]:
    """The columns, as one would write them."""
    wide = tensor.detach().to(torch.float64)
    finite = wide[wide.isfinite()]
    small = (wide.abs() < 2**-14) & (wide != 0)
    return {
        "min": finite.min().item() if finite.numel() else NAN,
        "max": finite.max().item() if finite.numel() else NAN,
        "rms": finite.square().mean().sqrt().item(),
        "zero_fraction": (wide == 0).double().mean().item(),
        "underflow_fraction": small.double().mean().item(),
        "nan_count": int(wide.isnan().sum()),
        "inf_count": int(wide.isinf().sum()),
    }


def check(row: nanscan.RangeRow, tensor: Tensor) -> None:
    for name, value in expected(tensor).items():
        tolerance = 1e-6 if name == "rms" else 0.0
        assert getattr(row, name) == pytest.approx(value, rel=tolerance, abs=0.0, nan_ok=True), name


def planted(dtype: torch.dtype, values: list[float], shape: tuple[int, ...] = (4, 6, 5, 8)) -> Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for place, value in zip((17, 3, 401), values, strict=False):
        tensor.view(-1)[place] = value
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("values", PLANTED.values(), ids=PLANTED)
def test_columns_are_those_of_plain_torch(dtype: torch.dtype, values: list[float]) -> None:
    tensor = planted(dtype, values)
    check(seen(tensor), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", (1, -1))
def test_one_sided_ranges(dtype: torch.dtype, sign: int) -> None:
    tensor = sign * (planted(dtype, []).abs() + 0.5)
    check(seen(tensor), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_do_not_matter(dtype: torch.dtype) -> None:
    tensor = planted(dtype, [0.0, NAN])
    for other in (
        tensor.to(memory_format=torch.channels_last),
        tensor.transpose(1, 3),
        tensor[:, ::2],
        tensor[:1, :1].expand(3, 2, 5, 8),
        torch.tensor(0.5, dtype=dtype),
    ):
        check(seen(other), other)


def test_gradients_are_with_respect_to_the_modules_output() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    outputs: list[Tensor] = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: (output.retain_grad(), outputs.append(output))[0])
    with nanscan.watch(model) as ranges:
        (model(torch.randn(7, 6)) * 1e-4).square().sum().backward()
    for name, output in zip("012", outputs, strict=True):
        check(ranges.rows(name, "activation")[0], output)
        check(ranges.rows(name, "gradient")[0], output.grad)


def test_complex_elements_count_once_and_range_by_modulus() -> None:
    row = seen(torch.tensor([3 + 4j, 0j, complex(NAN, 1), complex(1, INF)]))
    assert (row.min, row.max, row.nan_count, row.inf_count, row.zero_fraction) == (0.0, 5.0, 1, 1, 0.25)
    assert row.rms == pytest.approx(math.sqrt(12.5))


def test_float8_is_measured() -> None:
    row = seen(torch.tensor([1.0, -2.0, 0.0, 448.0]).to(torch.float8_e4m3fn))
    assert (row.min, row.max, row.zero_fraction) == (-2.0, 448.0, 0.25)


def test_nothing_finite_gives_nan_not_zero() -> None:
    row = seen(torch.full((3,), INF))
    assert math.isnan(row.min) and math.isnan(row.max) and math.isnan(row.rms) and row.inf_count == 3


@pytest.mark.parametrize("size", (1e-30, 1e25, 1e-180, 1e180))
def test_rms_of_any_magnitude(size: float) -> None:
    row = seen(torch.full((100,), size, dtype=torch.float64))
    assert row.rms == pytest.approx(size, rel=1e-12)


def test_without_the_native_engine_fractions_of_a_large_tensor_come_from_an_even_sample_and_the_rest_from_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(active_engine(), "measure_ranges", lambda tensor: None)
    monkeypatch.setattr(active_engine(), "range_meter", lambda take_other: None)
    tensor = torch.randn(64, 768).relu()
    tensor[:, ::3] = 0  # a pattern over the channels, which a stride of 3 or 12 would miss
    tensor[63, 767] = 9.0
    row, exact = seen(tensor), seen(tensor, sample=None)
    check(exact, tensor)
    assert row.zero_fraction == pytest.approx(exact.zero_fraction, abs=0.02) and row.zero_fraction != 0.0
    assert (row.min, row.max, row.rms, row.nan_count) == (exact.min, exact.max, exact.rms, exact.nan_count)
    tensor[63, 766] = NAN
    assert seen(tensor).nan_count == 1


def test_with_the_native_engine_fractions_are_over_all_elements() -> None:
    load_engine("native")
    tensor = torch.randn(64, 768).relu()
    tensor[5, 7] = 1e-6
    check(seen(tensor), tensor)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.complex64), ids=str)
@pytest.mark.parametrize("values", PLANTED.values(), ids=PLANTED)
def test_what_runs_on_accelerators_finds_the_same(dtype: torch.dtype, values: list[float]) -> None:
    tensor = planted(dtype, values)
    pending = on_device.launch(tensor)
    (there,), here = on_device.Transfer([pending]).get(), on_cpu.measure(tensor, None)
    assert there._replace(norm=0.0) == here._replace(norm=0.0)
    assert there.norm == pytest.approx(here.norm, rel=1e-6)


def test_a_complex_element_with_both_is_one_nan_on_accelerators_too() -> None:
    tensor = torch.tensor([complex(NAN, INF), complex(INF, 1.0), 2j])
    (there,) = on_device.Transfer([on_device.launch(tensor)]).get()
    here = on_cpu.measure(tensor, None)
    assert (there.nans, there.infs) == (here.nans, here.infs) == (1, 1)


def test_integers_meta_tensors_and_empty_ones_have_no_row() -> None:
    outputs = (torch.arange(3), torch.ones(2, device="meta"), torch.ones(0, 3), None, "text", 3.0)
    for output in outputs:
        model = Returns(output)
        with nanscan.watch(model) as ranges:
            model(torch.ones(1))
        assert ranges.rows() == [] and ranges.steps == 1
