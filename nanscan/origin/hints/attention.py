"""Hints for softmax and attention: rows in which every key is masked, scores that overflowed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nanscan.origin.hints.row import Row, names
from nanscan.origin.hints.view import View

__all__ = ["ROWS"]

_SOFTMAX = names("_softmax _log_softmax softmax log_softmax")
_ATTENTION = names(
    "_native_multi_head_attention _transformer_encoder_layer_fwd _masked_softmax _efficient_attention_forward "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable"
)
_CURE = (
    "Leave one key unmasked in each row, drop such samples before the model (nanscan.check_batch names them), or give "
    "masked rows a zero output with torch.where before the softmax"
)


def _row(view: View) -> Tensor | None:
    """The row of scores that the first bad element belongs to."""
    scores, dim = view.operand(0), view.setting(1, "dim", -1)
    if not isinstance(scores, Tensor) or len(view.at) != scores.dim():
        return None
    place: list[int | slice] = list(view.at)
    if place:
        place[dim] = slice(None)
    return scores[tuple(place)]


def _fully_masked(view: View) -> str | None:
    row, scores = _row(view), view.operand(0)
    if row is None or not bool((row == -math.inf).all()):
        return None
    dim = view.setting(1, "dim", -1) % max(scores.dim(), 1)
    where = "" if scores.dim() < 2 or dim == 0 else f"{_sample(view, scores)}: "
    name = view.name.strip("_")
    return f"{where}all keys masked, {name} of a row of {row.numel()} scores that are all -inf{view.aside} is 0/0"


def _minus_its_maximum(view: View) -> str | None:
    """`x - x.max(-1)` and `x - x.logsumexp(-1)`, as softmax by hand and `Categorical` do."""
    scores, other = view.operand(0), view.value(1)
    if not isinstance(scores, Tensor) or other != -math.inf or len(view.at) != scores.dim() or not view.at:
        return None
    row = scores[tuple(view.at[:-1])]
    if row.numel() < 2 or not bool((row == -math.inf).all()):
        return None
    where = "" if scores.dim() < 2 else f"sample {view.at[0]}: "
    return f"{where}all {row.numel()} scores of a row are -inf{view.aside}, and so is their maximum: -inf - -inf is NaN"


def _sample(view: View, scores: Tensor) -> str:
    """Which sample of the batch; MultiheadAttention has batch * heads as first dimension."""
    first = view.at[0]
    if view.event.module_type == "MultiheadAttention" and scores.dim() == 3:
        samples = _batch_size(view.event.args[0], scores.shape[0])
        if samples is None:
            return f"row {first} of batch * heads"
        first = first // (scores.shape[0] // samples)
    return f"sample {first}"


def _batch_size(scores: Tensor, rows: int) -> int | None:
    """The batch size that the projection had ([length, batch, embed], viewed as [length, batch * heads, head])."""
    waiting: list[Any] = [scores.grad_fn]
    steps = 0
    while waiting and steps < 24:
        node, steps = waiting.pop(0), steps + 1
        if node is None:
            continue
        sizes: Any = getattr(node, "_saved_self_sym_sizes", ()) if node.name() == "ViewBackward0" else ()
        if len(sizes) == 3 and 0 < sizes[1] <= rows and rows % sizes[1] == 0 and sizes[2] % (rows // sizes[1]) == 0:
            return int(sizes[1])
        waiting += [child for child, _ in node.next_functions]
    return None


def _masked_in_kernel(view: View) -> str | None:
    """Fused attention: the mask is one of its inputs."""
    for mask in view.event.inputs[1:]:
        if mask is None or mask.dim() < 2 or mask.numel() == 0:
            continue
        if mask.dtype is not torch.bool and not mask.is_floating_point():
            continue
        masked = mask if mask.dtype is torch.bool else mask == -math.inf
        rows = masked.all(-1).nonzero()
        if len(rows):
            row = rows[0].tolist()
            where = f"sample {row[0]}: " if mask.shape[0] > 1 else ""
            return f"{where}all keys masked, row {row} of the mask {list(mask.shape)} leaves no key, and softmax is 0/0"
    return None


def _overflowed(view: View) -> str | None:
    row = _row(view)
    if row is None or not bool((row == math.inf).any()):
        return None
    return f"a score of the row{view.where} is +inf, it overflowed before the {view.name.strip('_')}: inf - inf is NaN"


ROWS = (
    Row(
        "softmax over a fully masked row",
        _SOFTMAX,
        "a sample whose keys are all masked with -inf has a softmax of 0/0",
        _CURE,
        _fully_masked,
    ),
    Row(
        "fused attention with a fully masked row",
        _ATTENTION,
        "a sample whose keys are all masked has no attention weights: 0/0 in the fused kernel",
        _CURE,
        _masked_in_kernel,
    ),
    Row(
        "row of nothing but -inf minus its maximum",
        names("sub"),
        "a softmax by hand, or torch.distributions.Categorical, of a row in which every score or action is masked",
        "Leave one key or action unmasked in each row, or leave such rows out",
        _minus_its_maximum,
    ),
    Row(
        "softmax of +inf",
        _SOFTMAX,
        "a logit overflowed before; softmax subtracts the maximum, which is inf - inf",
        "Scale the scores before they overflow (q / sqrt(d) before q @ k.T), clamp them, or compute them in float32",
        _overflowed,
    ),
)
