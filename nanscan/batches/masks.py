"""Padding and attention masks that leave a sample nothing to attend to: its softmax is 0/0."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanscan.batches.fields import Field
from nanscan.batches.problem import BatchProblem

__all__ = ["any_row_masked", "judge_mask"]

_HIDDEN = -1e4  # what is added to a score to hide a key is at most this


def any_row_masked(role: str, value: Tensor) -> Tensor:
    """0-dim bool: does a row of the mask hide every key? `(batch, keys)`, or `(batch, …, keys)`: those of a sample."""
    return _masked_rows(role, value).any()


def judge_mask(field: Field, value: Tensor) -> list[BatchProblem]:
    """A problem that names the first row with every key hidden; `any_row_masked` has said that there is one."""
    masked = _masked_rows(field.role, value)
    rows = masked.nonzero().tolist()
    more = f" ({len(rows)} of {masked.numel()} rows do)" if len(rows) > 1 else ""
    row = f" row {rows[0][0] if len(rows[0]) == 1 else rows[0]}" if value.dim() > 1 else ""
    reason = (
        f"{field.name}{row} masks every key{more}: the softmax over no key is NaN; drop the sample or leave it one key"
    )
    path, _ = field.at((rows[0][0], 0)) if field.role != "scores" else (field.path, ())
    return [BatchProblem(path, reason, len(rows), None, "error", "mask", field.field)]


def _masked_rows(role: str, value: Tensor) -> Tensor:
    """bool `(batch,)`. Floating-point masks are added to the scores, unless they hold nothing but 0 and 1.

    Of a mask that is sure to be added every row counts, of the others a sample as a whole: masks of three and more
    dimensions leave the rows of padding without a key.
    """
    if role == "scores":
        return (value == -math.inf).all(-1)
    value = value.flatten(1) if value.dim() > 1 else value[None]  # else of one sample
    if value.is_floating_point():
        hidden = (value <= _HIDDEN).all(1)
        zero_one = ((value == 0) | (value == 1)).all() & (value == 1).any()
        told = (value != 0).all(1) if role == "padding" else (value == 0).all(1)
        return torch.where(zero_one, told, hidden)
    return (value != 0).all(1) if role == "padding" else (value == 0).all(1)
