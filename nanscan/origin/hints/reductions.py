"""Hints for reductions over nothing, over one element, or over nothing but -inf."""

from __future__ import annotations

import math

import torch

from nanscan.origin.hints.row import Row, names
from nanscan.origin.hints.view import View

__all__ = ["ROWS"]

_LOSSES = names(
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy nll_loss_forward nll_loss2d_forward soft_margin_loss "
    "multi_margin_loss multilabel_margin_loss_forward l1_loss binary_cross_entropy_with_logits kl_div"
)


def _empty(view: View) -> str | None:
    values = view.operand(0)
    if not isinstance(values, torch.Tensor) or values.numel() > 0:
        return None
    return f"{view.name} of an empty selection: its input has shape {list(values.shape)}, 0 elements, and 0/0 is NaN"


def _one_element(view: View) -> str | None:
    values = view.operand(0)
    if not isinstance(values, torch.Tensor):
        return None
    dims = view.setting(1, "dim")
    dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    over = list(values.shape) if not isinstance(dims, (list, tuple)) or not dims else [values.shape[d] for d in dims]
    count, correction = math.prod(over), view.event.kwargs.get("correction", 1)
    correction = 1 if correction is None else correction
    if count == 0 or count > correction:
        return None
    what = "one element" if count == 1 else f"{count} elements"
    return f"{view.name} over {what} (input {list(values.shape)}) with correction={correction} divides by 0"


def _norm_overflow(view: View) -> str | None:
    values = view.operand(0)
    if view.nan or not isinstance(values, torch.Tensor) or not bool(values.isfinite().all()):
        return None
    return f"the norm of {values.numel()} elements up to {float(values.abs().max()):.6g} is beyond {view.limit:.6g}"


def _only_minus_inf(view: View) -> str | None:
    values = view.event.saved.get("self")
    if not view.nan or not isinstance(values, torch.Tensor) or view.saved("self") != -math.inf:
        return None
    row = f"row {view.at[0]}: " if values.dim() > 1 else ""
    word = view.name.removesuffix("Backward").lower()
    return f"{row}{word} of nothing but -inf{view.where}, whose gradient is exp(-inf - -inf) = NaN"


def _plus_inf(view: View) -> str | None:
    if not view.nan or view.saved("self") != math.inf:
        return None
    return f"{view.name.removesuffix('Backward').lower()} of +inf{view.where}, whose gradient is exp(inf - inf) = NaN"


ROWS = (
    Row(
        "mean of an empty selection",
        names("mean std var std_mean var_mean nanmean median") | _LOSSES,
        "the mean (or a loss with reduction='mean') over 0 elements is 0/0",
        "Skip the term when nothing is selected, or divide a sum by max(count, 1)",
        _empty,
    ),
    Row(
        "std or var of one element",
        names("std var std_mean var_mean"),
        "the unbiased estimate divides by n - 1, which is 0",
        "Use correction=0 (unbiased=False), or leave such groups out",
        _one_element,
    ),
    Row(
        "norm overflow",
        names("linalg_vector_norm norm"),
        "the norm is beyond the dtype's largest number",
        "Compute norms in a wider dtype: torch.linalg.vector_norm(x, dtype=torch.float32), or torch.float64",
        _norm_overflow,
    ),
    Row(
        "logsumexp of all -inf",
        names("LogsumexpBackward LogcumsumexpBackward LogaddexpBackward Logaddexp2Backward"),
        "its value is a legitimate -inf, its gradient is NaN",
        "Mask with a large finite number (-1e4 fits float16) instead of -inf, or leave fully masked rows out before it",
        _only_minus_inf,
    ),
    Row(
        "logsumexp of +inf",
        names("LogsumexpBackward LogcumsumexpBackward LogaddexpBackward Logaddexp2Backward"),
        "a score overflowed before; the gradient is exp(inf - inf)",
        "Keep the scores finite: clamp them, or lower their scale",
        _plus_inf,
    ),
)
