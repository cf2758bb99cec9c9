"""Labels: class numbers within 0 … num_classes - 1, at least one valid target, probabilities within 0 … 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanscan.batches.fields import Field
from nanscan.batches.problem import BatchProblem
from nanscan.batches.spec import BatchSpec

__all__ = ["UINT8_TARGETS", "allowed_classes", "judge_classes", "judge_probabilities", "judge_uint8_targets"]

_PIXEL_MAX = 255
_PLUS_MINUS = "; labels look like -1 and 1: a cross-entropy takes 0 and 1, so (labels + 1) / 2"
_CAST_NANS = (-(2**63), -(2**31))  # the smallest number of int64 and of int32
_CAST_NAN = "; that is what a NaN becomes when it is cast to integers: look for missing labels before the cast"
UINT8_TARGETS = (math.nextafter(_PIXEL_MAX, 0.0), float(_PIXEL_MAX))  # magnitudes above, up to: look again


def judge_classes(field: Field, value: Tensor, low: float, high: float, spec: BatchSpec) -> list[BatchProblem]:
    """Integer labels whose least and largest value are `low` and `high`; the fast answer is that all is well."""
    classes = allowed_classes(spec)
    within = high != _PIXEL_MAX if classes is None else high < classes
    if classes is None and low in _CAST_NANS:
        return [_cast_nan(field, value, int(low))]
    if low >= 0 and within and not (low == high and low in spec.ignored):
        return []
    valid = torch.ones_like(value, dtype=torch.bool)
    for index in spec.ignored:
        valid &= value != index
    if not valid.any():
        return [] if value.dim() == 0 or not field.batched else [_no_target(field, value, spec)]
    if classes is None:
        return judge_uint8_targets(field, value) if high == _PIXEL_MAX and low == 0 else []
    bad = valid & ((value < 0) | (value >= classes))
    return [_out_of_range(field, value, valid, bad, classes, spec)] if bad.any() else []


def allowed_classes(spec: BatchSpec) -> int | None:
    """How many classes labels may be of. One output (a logit of its own) tells two classes apart."""
    return None if spec.num_classes is None else max(spec.num_classes, 2)


def _no_target(field: Field, value: Tensor, spec: BatchSpec) -> BatchProblem:
    index = " or ".join(str(index) for index in spec.ignored)
    reason = (
        f"no valid target: all {value.numel()} targets equal ignore_index {index}; the mean of such a loss is 0/0 = NaN"
    )
    return BatchProblem(field.path, reason, value.numel(), (0,) * value.dim(), "error", "no_target", field.field)


def _out_of_range(
    field: Field, value: Tensor, valid: Tensor, bad: Tensor, classes: int, spec: BatchSpec
) -> BatchProblem:
    count, index, path, within = field.first(bad)
    source = spec.source("num_classes")
    reason = (
        f"{field.name}: {_sample(field, index)} has {int(value[index])}, allowed 0..{classes - 1} "
        f"(num_classes {spec.num_classes}); {count} of {value.numel()} bad{_guess(value[valid], value[bad], classes)}"
        f"{f'; num_classes is that of {source}' if source else ''}"
    )
    return BatchProblem(path, reason, count, within, "error", "label", field.field)


def _cast_nan(field: Field, value: Tensor, low: int) -> BatchProblem:
    """Whatever the number of classes is, this is none."""
    bad = value == low
    count, index, path, within = field.first(bad)
    reason = f"{field.name}: {_sample(field, index)} has {low}; {count} of {value.numel()} bad{_CAST_NAN}"
    return BatchProblem(path, reason, count, within, "error", "label", field.field)


def _guess(valid: Tensor, bad: Tensor, classes: int) -> str:
    """What such labels usually are."""
    low, high = int(bad.min()), int(bad.max())
    if low in _CAST_NANS:
        return _CAST_NAN
    if low == high == _PIXEL_MAX and classes == 2 and bool(((valid == 0) | (valid == _PIXEL_MAX)).all()):
        return "; 0 and 255 look like a uint8 mask: divide by 255 (or give ignore_index=255 here and to the loss)"
    if low == high == -1 and classes == 2 and bool((valid.abs() == 1).all()) and bool((valid == 1).any()):
        return _PLUS_MINUS
    if low == high and low in (-1, -100, _PIXEL_MAX):
        return f"; {low} looks like ignore: if it is, give ignore_index={low} here and to the loss"
    if int(valid.min()) >= 1 and low == high == classes:
        return f"; labels look 1-based (1..{classes}): subtract 1"
    return ""


def judge_probabilities(field: Field, value: Tensor, low: float, high: float, spec: BatchSpec) -> list[BatchProblem]:
    """Floating-point targets of a loss over classes, such as binary cross-entropy: probabilities."""
    if low >= 0.0 and high <= 1.0:
        return []
    bad = ((value < 0) | (value > 1)) & value.isfinite()
    if not bad.any():
        return []
    count, index, path, within = field.first(bad)
    hint = f"; {_PIXEL_MAX} looks like a uint8 mask: divide by 255" if high == _PIXEL_MAX else _numbers(value, spec)
    hint = _PLUS_MINUS if low == -1.0 and high == 1.0 and bool((value.abs() == 1.0).all()) else hint
    reason = (
        f"{field.name}: {_sample(field, index)} has {value[index].item():g}, targets of a binary or soft "
        f"cross-entropy must lie in [0, 1]; {count} of {value.numel()} outside [0, 1]{hint}"
    )
    return [BatchProblem(path, reason, count, within, "error", "label", field.field)]


def _numbers(value: Tensor, spec: BatchSpec) -> str:
    """Class numbers that were made floating-point, as pandas makes them."""
    if value.dim() != 1 or (spec.num_classes or 0) < 3 or not bool((value == value.round()).all()):
        return ""
    return (
        f"; whole numbers look like classes stored as {str(value.dtype)[6:]}: cross_entropy takes them as labels.long()"
    )


def judge_uint8_targets(field: Field, value: Tensor) -> list[BatchProblem]:
    """Targets whose largest value is exactly 255: do they hold nothing but 0 and 255?"""
    bright = value == _PIXEL_MAX
    if not bool((bright | (value == 0)).all()):
        return []
    _, _, path, within = field.first(bright)
    reason = (
        f"{field.name}: holds only 0 and 255, which looks like a uint8 mask where 0 and 1 are meant (targets of a "
        "binary cross-entropy outside [0, 1]): divide by 255"
    )
    return [BatchProblem(path, reason, int(bright.sum()), within, "warning", "label", field.field)]


def _sample(field: Field, index: tuple[int, ...]) -> str:
    if not field.batched:
        return f"element {list(index)}" if index else "it"
    return f"sample {index[0]}" + (f" at {list(index[1:])}" if len(index) > 1 else "")
