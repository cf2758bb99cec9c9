"""Which samples of a tensor hold a NaN or Inf: looked at only once a scan has found that there is one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanscan.batches.fields import Field
from nanscan.batches.problem import BatchProblem
from nanscan.engine.result import Row
from nanscan.engine.tensors import full_index, is_float8
from nanscan.report_rows import unravel

__all__ = ["nonfinite"]

_NAMED_SAMPLES = 32


def nonfinite(field: Field, value: Tensor, row: Row, allow_nan: bool) -> list[BatchProblem]:
    """A problem for each sample with a NaN or Inf; `row` is what the scan said of the whole tensor.

    Args:
        allow_nan: NaN is legitimate here. `-inf` is in a mask that is added to scores (`field.additive`).
    """
    if value.layout is not torch.strided or value.is_nested or type(value) not in (Tensor, torch.nn.Parameter):
        return _as_a_whole(field, value, row, allow_nan)
    value = value.detach()
    value = value.float() if is_float8(value.dtype) else value
    samples = (
        value.flatten(1) if field.batched and value.dim() > 1 else value.reshape(len(value) if field.batched else 1, -1)
    )
    nan = samples.isnan()
    inf = samples == math.inf if field.additive and not value.is_complex() else samples.isinf() & ~nan
    if allow_nan:
        nan = torch.zeros_like(nan)
    worst = (nan | inf).to(torch.uint8)
    counts = torch.stack([nan.sum(1), inf.sum(1), worst.argmax(1)]).tolist()
    inner = value.shape[1:] if field.batched else value.shape
    found = []
    for sample, (nans, infs, at) in enumerate(zip(*counts, strict=True)):
        if nans or infs:
            path = f"{field.path}[{sample}]" if field.batched else field.path
            found.append(_problem(path, field, nans, infs, math.prod(inner), unravel(at, inner)))
    return _shortened(found, field)


def _as_a_whole(field: Field, value: Tensor, row: Row, allow_nan: bool) -> list[BatchProblem]:
    """For memory without samples (sparse, nested, sharded): the counts of the scan."""
    nans, infs = 0 if allow_nan else row.nan_count, row.inf_count
    if not nans and not infs:
        return []
    return [_problem(field.path, field, nans, infs, value.numel(), full_index(value, row.first_bad))]


def _problem(path: str, field: Field, nans: int, infs: int, numel: int, first: tuple[int, ...]) -> BatchProblem:
    counts = ", ".join(f"{count} {name}" for count, name in ((nans, "NaN"), (infs, "Inf")) if count)
    where = f" (first at {list(first)})" if first else ""
    return BatchProblem(path, f"has {counts} of {numel}{where}", nans + infs, first, "error", "nonfinite", field.field)


def _shortened(found: list[BatchProblem], field: Field) -> list[BatchProblem]:
    rest = found[_NAMED_SAMPLES:]
    if not rest:
        return found
    count = sum(problem.count for problem in rest)
    reason = f"has {count} NaN or Inf in {len(rest)} more samples"
    return [*found[:_NAMED_SAMPLES], BatchProblem(field.path, reason, count, None, "error", "nonfinite", field.field)]
