"""What every number means: float64, obvious and slow. For tests and documentation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanscan.engine.apply import clear_grads_if, scale_grads_, zero_nonfinite_grads_
from nanscan.engine.deferred import launch_grads
from nanscan.engine.result import Row, Scan, total
from nanscan.engine.tensors import Entry, flat_params, unique

__all__ = ["clear_grads_if", "launch_grads", "scale_grads_", "scan", "scan_grads", "zero_nonfinite_grads_"]


def scan(tensors: Sequence[Tensor | None], extra: Sequence[Tensor] = ()) -> Scan:
    """Scan ``tensors`` and ``extra``; see `nanscan.engine.scan`."""
    entries, others = unique(tensors), unique(extra, len(tensors))
    numel = sum(entry.values.numel() for entry in entries)
    return total([row(entry) for entry in entries], [row(entry) for entry in others], numel)


def scan_grads(param_groups: Sequence[dict[str, Any]], extra: Sequence[Tensor] = ()) -> Scan:
    """Scan the gradient of every parameter; see `nanscan.engine.scan_grads`."""
    return scan([p.grad for p in flat_params(param_groups)], extra)


def row(entry: Entry) -> Row:
    """The row of one tensor, from its elements as (real, imaginary) pairs of float64 in row-major order."""
    pairs = elements(entry.values)
    nan = np.isnan(pairs).any(axis=1)
    bad = ~np.isfinite(pairs).all(axis=1)
    finite = pairs[~bad]
    with np.errstate(over="ignore"):  # both parts may fit float64 where their modulus does not: inf
        moduli = np.hypot(finite[:, 0], finite[:, 1])
    return Row(
        position=entry.position,
        also=tuple(entry.also),
        finite_norm=norm(finite.ravel()),
        inf_norm=max(moduli.tolist(), default=0.0),
        nan_count=int(nan.sum()),
        inf_count=int((bad & ~nan).sum()),
        first_bad=int(bad.argmax()) if bad.any() else -1,
    )


def elements(values: Tensor) -> npt.NDArray[np.float64]:
    """Every element, in row-major order, as a row (real part, imaginary part; 0 for a real dtype)."""
    values = values.detach().cpu().reshape(-1)
    if values.is_complex():
        return torch.view_as_real(values.to(torch.complex128)).numpy()
    real = values.to(torch.float64).numpy()
    return np.stack([real, np.zeros_like(real)], axis=1)


def norm(numbers: npt.NDArray[np.float64]) -> float:
    """2-norm of finite numbers of any magnitude: scaled by a power of two (exact), squared, summed by `math.fsum`."""
    largest = float(np.abs(numbers).max(initial=0.0))
    if largest == 0.0:
        return 0.0
    exponent = math.frexp(largest)[1]
    root = math.sqrt(math.fsum(np.square(np.ldexp(numbers, -exponent)).tolist()))
    try:
        return math.ldexp(root, exponent)
    except OverflowError:  # every element fits float64, their norm does not
        return math.inf
