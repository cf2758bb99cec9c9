"""Tensors with known contents for the engine tests: dtype x layout x magnitude x planted values x shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

REAL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = REAL + COMPLEX + FLOAT8
BAD_VALUES = (math.nan, math.inf, -math.inf)


@dataclass(frozen=True)
class Spec:
    """What to make; ``low``/``high`` (0..1) is where in the dtype's exponent range the magnitudes lie."""

    dtype: torch.dtype
    layout: str
    shape: tuple[int, ...]
    low: float
    high: float
    planted: tuple[tuple[float, float], ...]  # (where, 0..1; what)
    seed: int


def specs(without: frozenset[str] = frozenset()) -> st.SearchStrategy[Spec]:
    where = st.floats(0, 1, exclude_max=True)
    shape = st.lists(st.integers(0, 9) | st.integers(1, 40), max_size=4).map(_bounded)
    span = st.tuples(where, where).map(sorted) | where.map(lambda x: [x, x]) | st.sampled_from([[0, 0], [1, 1], [0, 1]])
    planted = st.lists(st.tuples(where, st.sampled_from(BAD_VALUES)), max_size=4).map(tuple)
    clean = st.just(()) | planted
    fields = st.tuples(
        st.sampled_from(DTYPES),
        st.sampled_from(sorted(LAYOUTS.keys() - without)),
        shape,
        span,
        clean,
        st.integers(0, 999),
    )
    return fields.map(lambda f: Spec(f[0], f[1], f[2], *f[3], f[4], f[5]))


def _bounded(shape: list[int]) -> tuple[int, ...]:
    while math.prod(shape) > 4000:
        shape = shape[1:]
    return tuple(shape)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def numbers(count: int, dtype: torch.dtype, low: float, high: float, seed: int) -> Tensor:
    """``count`` finite numbers of ``dtype``: magnitudes from its smallest subnormal (0) to its largest number (1)."""
    rng = np.random.default_rng(seed)
    info = torch.finfo(dtype)
    bottom, top = math.log2(_smallest(dtype)), math.log2(info.max)
    exponents = bottom + (top - bottom) * rng.uniform(low, high, count)
    magnitudes = np.minimum(np.exp2(np.minimum(exponents, 1023.999)), info.max)
    if high == 1.0 and count:
        magnitudes[rng.integers(count)] = info.max
    return torch.from_numpy(magnitudes * rng.choice([-1.0, 1.0], count)).to(dtype)


def _smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return max(info.tiny * info.eps, 5e-324)


def dense(spec: Spec) -> tuple[Tensor, dict[int, float]]:
    """A contiguous tensor and what was planted: row-major index -> value (NaN wins over Inf in a complex element)."""
    count = math.prod(spec.shape)
    parts = 2 if spec.dtype.is_complex else 1
    real = real_dtype(spec.dtype)
    flat = numbers(count * parts, real, spec.low, spec.high, spec.seed)
    places = [int(where * count * parts) for where, _ in spec.planted] if count else []
    for at, (_, value) in zip(places, spec.planted, strict=False):
        flat[at] = writable(value, real)
    planted: dict[int, float] = {}
    for at in places:
        if not math.isnan(planted.get(at // parts, 0.0)):
            planted[at // parts] = float(flat[at])
    flat = flat if parts == 1 else torch.view_as_complex(flat.view(-1, 2))
    return flat.view(spec.shape), planted


def writable(value: float, dtype: torch.dtype) -> float:
    """``value``, or NaN where it is an Inf and ``dtype`` has none."""
    return math.nan if dtype is torch.float8_e4m3fn and math.isinf(value) else value


def contiguous(x: Tensor) -> Tensor:
    return x


def transposed(x: Tensor) -> Tensor:
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.movedim(0, -1).contiguous().movedim(-1, 0)


def sliced(x: Tensor) -> Tensor:
    """Every second element of a larger tensor, whose other elements are NaN."""
    outer = _nans([2 * n + 1 for n in x.shape], x.dtype)
    return outer[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x) if x.dim() else x


def misaligned(x: Tensor) -> Tensor:
    """In the middle of a flat buffer of NaN, at an odd element."""
    return _nans([x.numel() + 64], x.dtype)[13 : 13 + x.numel()].view(x.shape).copy_(x)


def narrow(x: Tensor) -> Tensor:
    """Rows inside wider rows of NaN: the innermost dimension is dense, the outer ones are not."""
    outer = _nans([n + 3 for n in x.shape], x.dtype)
    return outer[tuple(slice(2, 2 + n) for n in x.shape)].copy_(x)


def half_permuted(x: Tensor) -> Tensor:
    """A permuted slice of a buffer of NaN."""
    return narrow(x.movedim(-1, 0)).movedim(0, -1) if x.dim() else x


def requires_grad(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def conjugated(x: Tensor) -> Tensor:
    return x.conj() if x.is_complex() else x


def negated(x: Tensor) -> Tensor:
    return torch._neg_view(x)


class Subclass(Tensor):
    """A subclass without memory of its own."""


def subclass(x: Tensor) -> Tensor:
    return x.as_subclass(Subclass)


def parameter(x: Tensor) -> Tensor:
    return torch.nn.Parameter(x)


def singleton_strides(x: Tensor) -> Tensor:
    """A dimension of one element whose stride means nothing."""
    return x.unsqueeze(0).as_strided((1, *x.shape), (7777, *x.stride()))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f
    for f in (
        contiguous, transposed, channels_last, sliced, misaligned, narrow, half_permuted, requires_grad, inference,
        conjugated, negated, subclass, parameter, singleton_strides,
    )
}  # fmt: skip


def _nans(shape: list[int], dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        return torch.full(shape, complex(math.nan, math.nan), dtype=dtype)
    return torch.full(shape, math.nan, dtype=torch.float64).to(dtype)


def make(spec: Spec) -> tuple[Tensor, dict[int, float]]:
    """The tensor of ``spec`` and what was planted in it."""
    x, planted = dense(spec)
    return LAYOUTS[spec.layout](x), planted
