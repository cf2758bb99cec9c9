"""Bounding boxes without area: their logarithm is -inf, their overlap 0/0, and detectors refuse them."""

from __future__ import annotations

from torch import Tensor

from nanscan.batches.fields import Field
from nanscan.batches.problem import BatchProblem

__all__ = ["any_without_area", "form_of", "judge_boxes"]

_MANY = 4  # so many times more boxes that have an area tell that the last two numbers are a corner


def any_without_area(value: Tensor) -> Tensor:
    """0-dim bool: is there a box, of `(…, 4)`, that covers nothing if the last two numbers are a corner, or a size?"""
    first, last = value[..., :2], value[..., 2:]
    return ~((last > first) & (last > 0)).all()


def form_of(value: Tensor) -> str:
    """`"XYXY"`, `"XYWH"`, `"CXCYWH"` where boxes say so themselves, as torchvision's `BoundingBoxes` do; else `""`."""
    form = getattr(value, "format", "")
    return str(getattr(form, "value", form)).upper()


def judge_boxes(field: Field, value: Tensor, form: str = "") -> list[BatchProblem]:
    """A problem that names the first box without area in the form that the boxes have, if there is one."""
    certain, likely = _without_area(field, value, form)
    bad = certain | likely
    if not bool(bad.any()):
        return []
    count, index, path, within = field.first(bad)
    numbers = ", ".join(f"{number:g}" for number in value[index].tolist())
    reason = (
        f"{field.name}: box {list(index)} is ({numbers}), without width or height; {count} of {bad.numel()} bad. The "
        "log of its size is -inf and its overlap 0/0: drop such boxes, or mend the conversion between corners and sizes"
    )
    severity = "error" if bool(certain.any()) else "warning"
    return [BatchProblem(path, reason, count, within, severity, "box", field.field)]  # type: ignore[arg-type]


def _without_area(field: Field, value: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Boxes without area whatever the form (corners, corner and size, centre and size), and those that look so.

    Where the boxes don't say which it is, corners are taken for granted in `boxes` of a target per sample (as
    torchvision has them) that are no fractions, and told by the other boxes elsewhere. Rows of one number (0, -1, 1000)
    fill up a batch.
    """
    x, y, right, low = value.unbind(-1)
    fills = (value == value[..., :1]).all(-1) & field.batched
    certain = ((right <= 0) | (low <= 0)) & ~fills
    collapsed, inverted = (right == x) | (low == y), (right < x) | (low < y)
    if form and form != "XYXY":
        return certain, certain & False
    others = ~(collapsed | inverted | certain | fills)
    named = not field.batched and field.name == "boxes"
    corners = form == "XYXY" or (named and bool((value > 1).any()))
    certain = certain | ((collapsed | inverted) & corners & ~fills)
    alone = others.any() & ~(inverted & ~certain & ~fills).any()
    many = others.sum() >= _MANY * (inverted & ~certain & ~fills).sum().clamp(min=1)
    likely = ((collapsed & alone) | ((collapsed | inverted) & many)) & ~certain & ~fills
    return certain, likely
