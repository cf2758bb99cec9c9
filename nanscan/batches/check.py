"""`nanscan.check_batch`: what is wrong with a batch, before the model sees it."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanscan import engine
from nanscan.batches.classes import judge_uint8_targets
from nanscan.batches.finite import nonfinite
from nanscan.batches.huge import HUGE, judge_huge
from nanscan.batches.images import judge_scale
from nanscan.batches.plan import Plan, numbers, plan_for
from nanscan.batches.problem import BatchProblem
from nanscan.batches.question import Answer, Question
from nanscan.batches.quick import compiled
from nanscan.batches.spec import BatchSpec
from nanscan.batches.walk import leaves_of, shape_of
from nanscan.engine.result import BadInput, Row

__all__ = ["check_batch"]

_NOTHING_KNOWN = BatchSpec()


def check_batch(batch: Any, spec: BatchSpec | None = None) -> list[BatchProblem]:
    """Look for what is wrong with a batch: NaN and Inf, labels and tokens out of range, masks, shapes, scaling.

    Floating-point values are scanned in one pass (on a GPU: one read back, and a second one where integers, masks or
    ranges are judged, whatever the number of fields). Without a spec, integers are not range-checked. What is found:

    - NaN and Inf, per sample; `-inf` in a field called `…mask…` or `…bias…` is legitimate;
    - labels that are all the ignore index; padding and attention masks that hide every key of a sample;
    - bounding boxes without area, lengths of 0 (a warning), masks of 0 and 255 as targets (a warning);
    - empty fields, and inputs and labels that differ in their number of samples; masks unlike their tokens;
    - fields that contradict each other: targets that no CTC alignment can reach, lengths beyond the padded size, edges
      to nodes that are not there, boxes outside their image;
    - finite values whose square is Inf, as of a number that stands for missing data (a warning);
    - images that look unscaled, scaled twice, or constant (warnings; an image of zeros is taken for padding), and
      recordings that are silent (a warning);
    - with a spec: labels, tokens, positions, lengths, values, dtypes and shapes other than it allows.

    Args:
        batch: tensors, numpy arrays and numbers of any dtype and shape on any devices, in any nesting of dicts (and
            other mappings), lists, tuples, named tuples, dataclasses and graphs. The first dimension counts samples,
            except in a list with an entry per sample.
        spec: what the batches must look like; default: nothing is known.

    Returns:
        A `BatchProblem` for each thing found, in the order of the fields; `[]`: nothing.

    Raises:
        TypeError: `spec` is no `BatchSpec`.

    >>> import nanscan, torch
    >>> image = torch.zeros(2, 1, 2, 2)
    >>> image[1] = float("nan")
    >>> print(*nanscan.check_batch({"image": image, "label": torch.tensor([0, 1])}))
    batch["image"][1] has 4 NaN of 4 (first at [0, 0, 0])
    """
    if spec is None:
        spec = _NOTHING_KNOWN
    elif not isinstance(spec, BatchSpec):
        raise TypeError(f"spec must be a nanscan.BatchSpec, not a {type(spec).__name__}")
    latest = spec._quick
    if latest and latest[0](batch):  # of the form of the batch before, and all is well
        return []
    return _looked_at(batch, spec)


def _looked_at(batch: Any, spec: BatchSpec) -> list[BatchProblem]:
    """What is wrong with a batch, step by step."""
    values, form = _form(batch)
    plan = spec.plan_of(form)
    if plan is None:
        plan = plan_for(leaves_of(batch), spec, [value.dtype for value in values])
        plan.quick = compiled(batch, values, plan)
        spec.remember(form, plan)
    if plan.quick is not None and [plan.quick] != spec._quick:
        spec._quick[:] = [plan.quick]
        if plan.quick(batch):
            return []
    if plan.converted:
        values = [value for _, value in leaves_of(batch)]
    found = list(plan.problems)
    if not values and _holds_nothing(batch):
        what = "is None: a collate_fn that leaves out bad samples gives that where it leaves out all"
        found.append(BatchProblem("batch", what if batch is None else "is empty", kind="empty"))
    if plan.floats:
        found += _scanned(plan, values, spec)
    if plan.questions:
        found += _asked(plan.questions, values)
    return found if len(found) < 2 else _in_order(found, plan)


def _form(batch: Any) -> tuple[Sequence[Tensor], Hashable]:
    """The tensors of a batch, and what all batches with the same plan have in common.

    A tuple, list or dict of plain tensors, the usual case, is read without going through it step by step: between two
    training steps every line of Python costs five times what it costs in a loop of its own.
    """
    kind = type(batch)
    values = batch if kind is tuple or kind is list else [*batch.values()] if kind is dict else None
    if values is not None:
        form: list[Any] = [kind, (*batch,) if kind is dict else None]
        for value in values:
            if type(value) is not Tensor or value.is_nested:
                break
            form.append((value.dtype, value.shape, value.layout))
        else:
            return values, tuple(form)
    leaves = leaves_of(batch)
    return [value for _, value in leaves], tuple(
        [(steps, value.dtype, shape_of(value), value.layout) for steps, value in leaves]
    )


def _holds_nothing(batch: Any) -> bool:
    return batch is None or (isinstance(batch, (list, tuple, dict)) and len(batch) == 0)


def _scanned(plan: Plan, values: Sequence[Tensor], spec: BatchSpec) -> list[BatchProblem]:
    """NaN and Inf, and what the largest magnitudes say; one scan for all."""
    chosen, unreadable = plan.floats, []
    while True:
        try:
            scan = engine.scan([values[i] for i in chosen])
            break
        except BadInput as bad:
            field = plan.fields[chosen[bad.position]]
            reason = f"cannot be checked: it {bad.reason}"
            unreadable.append(BatchProblem(field.path, reason, 1, None, "warning", "unreadable", field.field))
            chosen = [i for position, i in enumerate(chosen) if position != bad.position]
    huge = bool(plan.squared) and scan.inf_norm > HUGE[0]
    if scan.finite and not plan.scales and not plan.targets and not huge:
        return unreadable
    rows = {position: row for row in scan.rows() for position in (row.position, *row.also)}
    found = unreadable
    for position, i in enumerate(chosen):
        found += _by_row(plan, i, values[i], rows[position], spec)
    return found


def _by_row(plan: Plan, i: int, value: Tensor, row: Row, spec: BatchSpec) -> list[BatchProblem]:
    field, known = plan.fields[i], spec.known_of(plan.fields[i].field)
    found = []
    if row.nan_count or row.inf_count:
        found += nonfinite(field, value, row, known is not None and known.allow_nan)
    if i in plan.scales:
        told = spec.value_range is not None or (known is not None and known.bounded)
        found += judge_scale(field, numbers(value), row.inf_norm, told)
    if i in plan.squared and row.inf_norm > HUGE[0]:
        found += judge_huge(field, numbers(value))
    if i in plan.targets and row.inf_norm == 255.0:
        found += judge_uint8_targets(field, numbers(value))
    return found


def _asked(questions: Sequence[Question], values: Sequence[Tensor]) -> list[BatchProblem]:
    """Ask everything, and judge; answers that lie on another device are brought over together, after the last one."""
    found: list[BatchProblem] = []
    away: list[tuple[Question, Sequence[Answer]]] = []
    for question in questions:
        told = question.ask(values[question.leaf], *question.beside(values))
        first = told[0]
        if isinstance(first, Tensor):
            if not first.is_cpu:
                away.append((question, told))
                continue
            told = [answer.item() for answer in told]  # type: ignore[union-attr]
        found += _judged(question, told, values)
    for question, told in _brought(away) if away else ():
        found += _judged(question, told, values)
    return found


def _judged(question: Question, told: Sequence[Any], values: Sequence[Tensor]) -> list[BatchProblem]:
    if question.is_well(told):
        return []
    return question.judge(values[question.leaf], told, *question.beside(values))


def _brought(away: Sequence[tuple[Question, Sequence[Any]]]) -> list[tuple[Question, list[float]]]:
    """The answers as numbers; those of one device come over in one transfer, each in its 64 bits."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, told in away:
        by_device.setdefault(told[0].device, []).extend(told)
    bits = {device: iter(torch.stack([_bits(a) for a in group]).tolist()) for device, group in by_device.items()}
    return [(question, [_number(next(bits[a.device]), a) for a in told]) for question, told in away]


def _number(bits: int, answer: Tensor) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0]) if answer.is_floating_point() else bits


def _bits(answer: Tensor) -> Tensor:
    return answer.double().view(torch.int64) if answer.is_floating_point() else answer.long()


def _in_order(found: list[BatchProblem], plan: Plan) -> list[BatchProblem]:
    """By field, errors before warnings; otherwise as found."""
    place = {field.field: i for i, field in reversed(list(enumerate(plan.fields)))}
    return sorted(found, key=lambda problem: (problem.severity != "error", place.get(problem.field, -1)))
