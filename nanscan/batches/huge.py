"""Finite values so large that their square is none: what data sets write for "no data" (1e20, 9.97e36, -3.4e38)."""

from __future__ import annotations

import torch
from torch import Tensor

from nanscan.batches.fields import Field
from nanscan.batches.problem import BatchProblem
from nanscan.batches.spec import BatchSpec

__all__ = ["HUGE", "judge_huge", "may_be_huge"]

_LARGEST = torch.finfo(torch.float32).max
HUGE = (_LARGEST**0.5, _LARGEST)  # magnitudes above, up to
_WIDE = frozenset({torch.float32, torch.bfloat16})  # float16 ends before, and float64 is meant to hold such numbers
_SCORES = frozenset({"scores", "padding", "attention"})


def may_be_huge(field: Field, spec: BatchSpec) -> bool:
    """True for a field whose values a loss or a norm may square: not a mask, nor one whose range is known."""
    told = spec.value_range is not None and field.role in ("image", "input")
    return field.dtype in _WIDE and not (told or field.additive or field.role in _SCORES)


def judge_huge(field: Field, value: Tensor) -> list[BatchProblem]:
    """Values whose square is Inf; the first of them is named."""
    bad = (value.abs() > HUGE[0]) & value.isfinite()
    if not bool(bad.any()):
        return []
    count, index, path, within = field.first(bad)
    where = f" at {list(within)}" if within else ""
    reason = (
        f"has {value[index].item():.6g}{where}; {count} of {value.numel()} values of {field.name} are so large that "
        "their square, and so a squared error or a norm, is Inf in float32: a stand-in for missing data? Mask "
        "or replace it"
    )
    return [BatchProblem(path, reason, count, within, "warning", "range", field.field)]
