"""What is to be read of a batch of one form: worked out once, then done for each batch of that nesting and shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanscan.batches.boxes import any_without_area, form_of, judge_boxes
from nanscan.batches.boxes_in_images import ask_boxes
from nanscan.batches.classes import UINT8_TARGETS, allowed_classes, judge_classes, judge_probabilities
from nanscan.batches.ctc import ask_alignments
from nanscan.batches.fields import Field, Placed, fields_of, is_int
from nanscan.batches.graphs import ask_graphs
from nanscan.batches.huge import HUGE, may_be_huge
from nanscan.batches.images import (
    any_may_be_constant,
    any_may_be_silent,
    judge_constant,
    judge_range,
    judge_silent,
    odd_scales,
)
from nanscan.batches.lengths import ask_lengths
from nanscan.batches.masks import any_row_masked, judge_mask
from nanscan.batches.next_tokens import ask_next_tokens
from nanscan.batches.problem import BatchProblem
from nanscan.batches.question import Answer, Answers, Question
from nanscan.batches.quick import Quick
from nanscan.batches.shapes import judge_shapes
from nanscan.batches.spec import BatchSpec, FieldSpec
from nanscan.batches.tokens import judge_ids, judge_lengths
from nanscan.batches.walk import WIDE, Leaf
from nanscan.engine.tensors import is_float8

__all__ = ["Plan", "numbers", "plan_for"]

_SHORT = 512
_TOGETHER = (ask_lengths, ask_alignments, ask_graphs, ask_boxes, ask_next_tokens)  # of fields that must agree


@dataclass
class Plan:
    """How to check batches of one form.

    Attributes:
        fields: of each leaf.
        problems: what the form alone says.
        floats: which leaves are scanned for NaN and Inf.
        scales: which of these are images whose largest magnitude is looked at.
        targets: which of these are floating-point labels of which nothing is known.
        squared: which of these a loss may square, so that huge ones are looked for.
        questions: what else is asked of the values.
        converted: True if a tensor has a dtype that has to be converted each time.
        odd_magnitudes: of a leaf: largest magnitudes (above, up to) at which one of these three looks again.
        quick: says of a batch that all is well (False: not known); None: there is no such shortcut.
    """

    fields: list[Field]
    problems: list[BatchProblem] = field(default_factory=list)
    floats: list[int] = field(default_factory=list)
    scales: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    squared: list[int] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    converted: bool = False
    odd_magnitudes: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    quick: Callable[[Any], bool] | None = None


def plan_for(leaves: Sequence[Leaf], spec: BatchSpec, dtypes: Sequence[torch.dtype]) -> Plan:
    """The plan for batches that look like these leaves; `dtypes` are those before any conversion."""
    fields = fields_of(leaves)
    plan = Plan(fields, judge_shapes(fields, spec))
    plan.converted = any(given in WIDE for given in dtypes)
    readable: list[Placed] = []
    for i, (one, (_, value)) in enumerate(zip(fields, leaves, strict=True)):
        floating = one.dtype.is_floating_point or one.dtype.is_complex
        if floating:
            plan.floats.append(i)
        if value.layout is torch.strided and not value.is_nested and value.numel() and not one.dtype.is_complex:
            _ask(plan, i, one, spec)
            if spec.known_of(one.field) != FieldSpec():
                readable.append((i, one))
    plan.questions += [question for ask in _TOGETHER for question in ask(readable, spec)]
    return plan


def _ask(plan: Plan, i: int, one: Field, spec: BatchSpec) -> None:
    known = spec.known_of(one.field)
    if known is not None and known.bounded:
        bounds = (-math.inf if known.min is None else known.min, math.inf if known.max is None else known.max)
        plan.questions.append(Question(i, _extremes, partial(_bounded, one, bounds, spec), bounds, _within(*bounds)))
    elif known == FieldSpec():
        return
    elif may_be_huge(one, spec):
        plan.squared.append(i)
        _ask_floats(plan, i, one, spec)
        plan.odd_magnitudes.setdefault(i, []).append(HUGE)
    elif is_int(one.dtype):
        _ask_integers(plan, i, one, spec)
    elif one.dtype.is_floating_point:
        _ask_floats(plan, i, one, spec)
    if one.role == "box" and (known is None or known != FieldSpec()):
        boxes = lambda value, told: judge_boxes(one, numbers(value), form_of(value)) if told[0] else []  # noqa: E731
        plan.questions.append(Question(i, _box_answer, boxes))
    if _is_mask(one):
        ask = partial(_mask_answer, one.role)
        judge = lambda value, told: judge_mask(one, numbers(value)) if told[0] else []  # noqa: E731
        plan.questions.append(Question(i, ask, judge, None, _mask_quick(one)))


def _is_mask(one: Field) -> bool:
    """Whether it is known what it hides: padding by sample, attention by sample too, additive ones by row."""
    if one.role == "scores":
        return True
    dims = {"padding": range(2, 3), "attention": range(2, 6)}.get(one.role, range(0))
    return len(one.shape) in dims if one.batched else bool(dims) and len(one.shape) == 1


def _ask_integers(plan: Plan, i: int, one: Field, spec: BatchSpec) -> None:
    ask = _short_extremes if len(one.shape) <= 1 and math.prod(one.shape) <= _SHORT else torch.aminmax
    if one.role == "label":
        maps = one.dtype is torch.uint8 or len(one.shape) > 2  # which may hold 0 and 255
        most = spec.num_classes or (255 if maps else math.inf)
        fine = None if any(index >= 0 for index in spec.ignored) else (0, most - 1)
        quick = _valid_classes(spec, most_known=fine is not None and not maps)
        plan.questions.append(Question(i, ask, partial(_judged, judge_classes, one, spec), fine, quick))
        return
    if one.role == "lengths":
        plan.questions.append(
            Question(i, ask, lambda value, told: judge_lengths(one, value), (1, math.inf), _within(1, math.inf))
        )
    size = spec.rows_of(one.role)
    if size is not None:
        quick = _within(0, size - 1)
        plan.questions.append(Question(i, ask, partial(_judged, judge_ids, one, spec), (0, size - 1), quick))


def _ask_floats(plan: Plan, i: int, one: Field, spec: BatchSpec) -> None:
    if one.role == "label":
        if spec.num_classes is not None and not spec.source("num_classes"):
            judge = lambda value, told: judge_probabilities(one, numbers(value), told[0], told[1], spec)  # noqa: E731
            plan.questions.append(Question(i, _extremes, judge, (0.0, 1.0), _within(0.0, 1.0)))
        else:
            plan.targets.append(i)
            plan.odd_magnitudes[i] = [UINT8_TARGETS]
    if one.role == "audio" and one.batched and one.shape[0] > 1 and math.prod(one.shape[1:]) > 1:
        silent = lambda value, told: judge_silent(one, numbers(value)) if told[0] else []  # noqa: E731
        plan.questions.append(Question(i, _silent_answer, silent))
    if one.role not in ("image", "input"):
        return
    picture = one.batched and (len(one.shape) == 4 or (one.role == "image" and len(one.shape) == 3))
    if spec.value_range is not None:
        judge = partial(_bounded, one, spec.value_range, spec)
        plan.questions.append(Question(i, _extremes, judge, spec.value_range, _within(*spec.value_range)))
    if picture or (one.role == "image" and len(one.shape) >= 2):
        plan.scales.append(i)
        plan.odd_magnitudes[i] = odd_scales(told=spec.value_range is not None)
    if picture and one.shape[0] > 1 and math.prod(one.shape[1:]) > 1:
        judge = lambda value, told: judge_constant(one, numbers(value)) if told[0] else []  # noqa: E731
        plan.questions.append(Question(i, _constant_answer, judge, None, Quick("varies")))


def _within(low: float, high: float) -> Quick | None:
    """None where a bound is so large an integer that as a float it may be another."""
    exact = all(abs(bound) <= 2**53 or math.isinf(bound) for bound in (low, high))
    return Quick("within", float(low), float(high)) if exact else None


def _valid_classes(spec: BatchSpec, most_known: bool) -> Quick | None:
    """At least one class that is not ignored, and none out of range, as `judge_classes` asks; None: several ignored.

    Where the number of classes is not known, 255 may be the white of a mask, unless `most_known` says otherwise.
    """
    if len(spec.ignored) > 1:
        return None
    ignored = spec.ignored[0] if spec.ignored else None
    classes = allowed_classes(spec)
    if classes is not None:
        return Quick("within", 0.0, classes - 1.0, ignored)
    return Quick("within", 1.0 - 2**31, math.inf if most_known else 254.0, None if ignored == 255 else ignored)


def _mask_quick(one: Field) -> Quick | None:
    """None for masks of more than two dimensions and those that are added."""
    plain = one.role in ("padding", "attention") and len(one.shape) == 2
    return Quick("mask", zero_hides=one.role == "attention") if plain else None


def _judged(
    judge: Callable[[Field, Tensor, float, float, BatchSpec], list[BatchProblem]],
    one: Field,
    spec: BatchSpec,
    value: Tensor,
    told: Answers,
) -> list[BatchProblem]:
    low, high = told
    return judge(one, value, low, high, spec)


def _bounded(
    one: Field, bounds: tuple[float, float], spec: BatchSpec, value: Tensor, told: Answers
) -> list[BatchProblem]:
    """Values against bounds; an ignore index among labels is not one of the values."""
    value = numbers(value)
    if one.role == "label" and is_int(value.dtype) and (told[0] < bounds[0] or told[1] > bounds[1]):
        ignored = torch.zeros_like(value, dtype=torch.bool)
        for index in spec.ignored:
            ignored |= value == index
        value = value.masked_fill(ignored, max(int(bounds[0]) if bounds[0] > -math.inf else 0, 0))
        told = [float(answer) for answer in torch.stack(_extremes(value)).tolist()]
    return judge_range(one, value, told[0], told[1], bounds)


def _extremes(value: Tensor) -> tuple[Tensor, ...]:
    if value.dtype is torch.bool:
        value = value.to(torch.uint8)
    return tuple(torch.aminmax(numbers(value)))


def _short_extremes(value: Tensor) -> Sequence[Answer]:
    """Of a few integers: cheaper in Python than through two operators and two reads."""
    if not value.is_cpu:
        return tuple(torch.aminmax(value))
    listed = value.tolist()
    return (min(listed), max(listed)) if isinstance(listed, list) else (listed, listed)


def _mask_answer(role: str, value: Tensor) -> tuple[Tensor, ...]:
    return (any_row_masked(role, numbers(value)),)


def _box_answer(value: Tensor) -> tuple[Tensor, ...]:
    return (any_without_area(numbers(value)),)


def _constant_answer(value: Tensor) -> tuple[Tensor, ...]:
    return (any_may_be_constant(numbers(value)),)


def _silent_answer(value: Tensor) -> tuple[Tensor, ...]:
    return (any_may_be_silent(numbers(value)),)


def numbers(value: Tensor) -> Tensor:
    """The tensor without its graph and in a dtype that PyTorch can compare."""
    value = value.detach()
    return value.float() if is_float8(value.dtype) else value
