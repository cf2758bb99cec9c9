"""Hints for what only happens because float16 ends at 65504 and begins at 6e-8."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from nanscan.origin.hints.row import Row, names
from nanscan.origin.hints.view import View, short

__all__ = ["ROWS"]

_LITERAL = re.compile(r"(?<![\w.])(?:\d+(?:\.\d*)?e-\d+|0\.0{6,}\d+)(?![\w.])", re.IGNORECASE)


def _lost_eps(view: View) -> str | None:
    """An eps on the line that float16 rounds to 0, where the divisor or the argument is 0."""
    if not view.is_float16 or view.value(1 if view.name == "div" else 0) != 0.0:
        return None
    half = {text: torch.tensor(float(text), dtype=torch.float16, device="cpu") for text in _LITERAL.findall(view.code)}
    lost = [text for text, value in half.items() if float(value) == 0]
    if lost:
        return f"eps {lost[0]} is 0 in float16 (smallest number 6e-8), so {view.name} got exactly 0{view.where}"
    if re.search(r"eps|normalize\(|cosine_similarity\(", view.code):
        return f"{view.name} got exactly 0{view.where} in spite of an eps: below 3e-8 it is 0 in float16"
    return None


def _optimizer(view: View) -> str | None:
    divisor = view.operand(2)
    if not isinstance(divisor, Tensor) or view.value(2) != 0.0 or (view.code and "step" not in view.code):
        return None
    dtype = str(divisor.dtype).removeprefix("torch.")
    place = f"addcdiv, {short(view.value(1))} / 0{view.where}"
    if divisor.dtype is torch.float16:
        return f"the divisor of the update ({place}) is 0: in float16 an eps of 1e-8 and small squares are 0"
    return f"the divisor of the update ({place}) is 0 in {dtype}: the optimizer's eps is 0"


def _masked_twice(view: View) -> str | None:
    """A mask of `finfo.min` was added on top of another one."""
    half = float(torch.finfo(view.bad.dtype).min) / 2
    if view.nan or view.bad.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    values = [view.value(0), view.value(1)]
    known = [v for v in values if v is not None]
    if not known or any(v > half or math.isinf(v) for v in known) or float(view.bad[tuple(view.at)]) != -math.inf:
        return None
    total = " + ".join("finfo.min" if v == 2 * half else "?" if v is None else short(v) for v in values)
    return f"a mask was added to scores that were masked already: {total} = -inf in {view.dtype}{view.aside}"


def _cast(view: View) -> str | None:
    value = view.value(0)
    if value is None or not math.isfinite(value):
        return None
    return f"{short(value)}{view.where} was cast to {view.dtype}, which ends at {short(view.limit)}"


ROWS = (
    Row(
        "eps that is 0 in float16",
        names("div reciprocal log log2 log10 rsqrt"),
        "a literal such as 1e-8 is 0 in float16, so that the divisor (or the argument of a log) is 0",
        "Use an eps of at least 1e-4 in float16, or compute this in float32",
        _lost_eps,
    ),
    Row(
        "optimizer with an eps of 0",
        names("addcdiv"),
        "Adam's eps of 1e-8 is 0 in float16, and the update is divided by sqrt(v) + eps = 0",
        "Keep float32 parameters (autocast with master weights), or give the optimizer eps=1e-4",
        _optimizer,
    ),
    Row(
        "mask added twice",
        names("add sub rsub"),
        "finfo.min + finfo.min is -inf, and a row of -inf becomes NaN in the softmax",
        "Add the mask once, join masks as booleans (torch.logical_or), or fill with a number that fits twice (-1e4)",
        _masked_twice,
    ),
    Row(
        "cast beyond the range",
        names("_to_copy copy"),
        "the number is beyond the largest of the smaller dtype (65504 in float16, 57344 in float8_e5m2)",
        "Use bfloat16, scale it down before the cast, or leave this op in float32",
        _cast,
    ),
)
