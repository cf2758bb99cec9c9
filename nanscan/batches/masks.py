"""Padding and attention masks that leave a sample nothing to attend to: its softmax is 0/0."""

from __future__ import annotations

import torch
from torch import Tensor

from nanscan.batches.fields import Field
from nanscan.batches.problem import BatchProblem

__all__ = ["any_row_masked", "judge_mask"]

_HIDDEN = -1e4  # what is added to a score to hide a key is at most this


def any_row_masked(role: str, value: Tensor) -> Tensor:
    """0-dim bool: does a row of the mask `(batch, keys)` hide every key?"""
    return _masked_rows(role, value).any()


def judge_mask(field: Field, value: Tensor) -> list[BatchProblem]:
    """A problem that names the first row with every key hidden; `any_row_masked` has said that there is one."""
    rows = _masked_rows(field.role, value).nonzero().flatten().tolist()
    more = f" ({len(rows)} of {value.shape[0]} rows do)" if len(rows) > 1 else ""
    reason = (
        f"{field.name} row {rows[0]} masks every key{more}: the softmax over no key is NaN; drop the sample or leave "
        "it one key"
    )
    path, _ = field.at((rows[0], 0))
    return [BatchProblem(path, reason, len(rows), None, "error", "mask", field.field)]


def _masked_rows(role: str, value: Tensor) -> Tensor:
    """bool `(batch,)`. Floating-point masks are added to the scores, unless they hold nothing but 0 and 1."""
    if value.is_floating_point():
        hidden = (value <= _HIDDEN).all(1)
        zero_one = ((value == 0) | (value == 1)).all() & (value == 1).any()
        told = (value != 0).all(1) if role == "padding" else (value == 0).all(1)
        return torch.where(zero_one, told, hidden)
    return (value != 0).all(1) if role == "padding" else (value == 0).all(1)
