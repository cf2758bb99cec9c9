"""Scanning and changing in plain Paddle operators: any device, no compiler. Slow and obvious: float64 throughout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import paddle

from nanscan.engine.result import Row, Scan, total
from nanscan.integrations.paddle.tensors import Entry, dtype_name, unique

__all__ = ["scale_", "scan", "zero_nonfinite_"]


@paddle.no_grad()
def scan(tensors: Sequence[Any], extra: Sequence[Any] = ()) -> Scan:
    """Scan ``tensors`` and ``extra``; see `nanscan.integrations.paddle.engine.scan_tensors`."""
    entries, others = unique(tensors), unique(extra, len(tensors))
    rows = [_row(entry) for entry in (*entries, *others)]
    return total(rows[: len(entries)], rows[len(entries) :], sum(int(e.values.size) for e in entries))


def _row(entry: Entry) -> Row:
    parts = _parts(entry.values)
    if not entry.values.size:
        return Row(entry.position, tuple(entry.also), 0.0, 0.0, 0, 0, -1)
    nan = paddle.isnan(parts).any(axis=1)
    bad = paddle.logical_or(nan, paddle.isinf(parts).any(axis=1))
    nan_count, bad_count = int(nan.astype("int64").sum()), int(bad.astype("int64").sum())
    first = int(bad.astype("int32").argmax()) if bad_count else -1
    finite = parts if not bad_count else paddle.where(bad.unsqueeze(1), paddle.zeros_like(parts), parts)
    norm, peak = _norms(finite)
    return Row(entry.position, tuple(entry.also), norm, peak, nan_count, bad_count - nan_count, first)


def _parts(values: Any) -> Any:
    """The elements in logical order as float64, of shape (n, 1); complex ones (n, 2)."""
    values = values.detach()
    if values.is_complex():
        return paddle.as_real(values.reshape([-1])).astype("float64")
    wide = values if dtype_name(values.dtype) == "float64" else values.astype("float32").astype("float64")
    return wide.reshape([-1, 1])


def _norms(parts: Any) -> tuple[float, float]:
    """(2-norm, largest magnitude) of finite elements; scaled first, because squares may leave float64."""
    largest = float(parts.abs().max())
    if largest == 0.0:
        return 0.0, 0.0
    squares = (parts / largest).square().sum(axis=1)
    return largest * math.sqrt(float(squares.sum())), largest * math.sqrt(float(squares.max()))


@paddle.no_grad()
def scale_(tensors: Sequence[Any], factor: float, clip_value: float | None = None) -> None:
    """See `nanscan.integrations.paddle.engine.scale_`. Of a complex tensor both parts are clamped each."""
    for entry in unique(tensors):
        values = entry.values
        if factor == 1.0 and clip_value is None or not values.size:
            continue
        wide = _wide(values) * factor
        if clip_value is not None:
            real = paddle.as_real(wide) if wide.is_complex() else wide
            real = real.clip(-clip_value, clip_value)
            wide = paddle.as_complex(real) if wide.is_complex() else real
        paddle.assign(wide.astype(values.dtype), values)  # elements that share memory get the same value


@paddle.no_grad()
def zero_nonfinite_(tensors: Sequence[Any]) -> None:
    """See `nanscan.integrations.paddle.engine.zero_nonfinite_`; a complex element as a whole."""
    for entry in unique(tensors):
        wide = _wide(entry.values)
        fine = paddle.isfinite(wide)
        if not bool(fine.all()):
            kept = paddle.where(fine, wide, paddle.zeros_like(wide))
            paddle.assign(kept.astype(entry.values.dtype), entry.values)


def _wide(values: Any) -> Any:
    """In a dtype that has all operators on every device; no number changes."""
    name = dtype_name(values.dtype)
    return values if name in ("float32", "float64", "complex64", "complex128") else values.astype("float32")
