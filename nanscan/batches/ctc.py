"""Targets that no CTC alignment can reach: longer than their input, or with the blank or an unknown class in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from nanscan.batches.fields import Field, Placed, families, is_int
from nanscan.batches.lengths import LOG_PROBS
from nanscan.batches.problem import BatchProblem
from nanscan.batches.question import Answers, Question
from nanscan.batches.spec import BatchSpec

__all__ = ["ask_alignments"]

_INPUT_LENGTHS = re.compile(r"(inputs?|log_?probs)_?(lengths?|lens?)")
_TARGET_LENGTHS = re.compile(r"(targets?|labels?)_?(lengths?|lens?)")
_TARGETS = ("targets", "target", "labels", "label")
_SOUND = re.compile(r"(.*_)?(spectrograms?|spec|mels?|melspecs?|mfccs?|fbanks?)")


def ask_alignments(readable: Sequence[Placed], spec: BatchSpec) -> list[Question]:
    """What a CTC loss asks of targets, their lengths and those of the inputs.

    That it is CTC is sure where log-probabilities (steps, samples, classes) lie beside them, and likely where sound
    does. Sequences of other kinds may well be shorter than their targets.
    """
    return [question for family in families(readable).values() for question in _ask(family)]


def _ask(family: dict[str, Placed]) -> list[Question]:
    inputs = _one(family, _INPUT_LENGTHS)
    lengths = _one(family, _TARGET_LENGTHS)
    targets = next((family[name] for name in _TARGETS if name in family), None)
    if inputs is None or lengths is None or targets is None or inputs[1].shape != lengths[1].shape:
        return []
    count = lengths[1].shape[0]
    flat = len(targets[1].shape) == 1
    rows = len(targets[1].shape) == 2 and targets[1].shape[0] == count
    scores = next((family[name][1] for name in LOG_PROBS if name in family), None)
    sure = scores is not None and _are_of_ctc(scores.shape, count, targets[1].shape)
    if not is_int(targets[1].dtype) or not (flat or rows) or not (sure or _any_sound(family)):
        return []
    judge = partial(_judge_length, targets[1], inputs[1], sure)
    found = [Question(targets[0], _count_impossible, judge, (0, 0), "beside", (inputs[0], lengths[0]))]
    if sure and scores is not None:
        found.append(_ask_classes(targets, lengths, scores.shape[2]))
        found += _ask_blank(targets, lengths, family.get("blank"))
    return found


def _are_of_ctc(shape: tuple[int, ...], count: int, targets: tuple[int, ...]) -> bool:
    """(steps, samples, classes); with samples first they may be those of a decoder, one step for each label."""
    if len(shape) != 3 or shape[0] == shape[1]:
        return False
    return shape[1] == count or (shape[0] == count and shape[1] != targets[-1])


def _one(family: dict[str, Placed], pattern: re.Pattern[str]) -> Placed | None:
    """The only lengths of that name, one for each sample."""
    found = [(i, f) for name, (i, f) in family.items() if pattern.fullmatch(name)]
    return found[0] if len(found) == 1 and len(found[0][1].shape) == 1 and is_int(found[0][1].dtype) else None


def _any_sound(family: dict[str, Placed]) -> bool:
    floats = [(name, field) for name, (_, field) in family.items() if field.dtype.is_floating_point]
    return any(field.role == "audio" or (_SOUND.fullmatch(name) and len(field.shape) > 2) for name, field in floats)


def _used(targets: Tensor, lengths: Tensor) -> Tensor:
    """bool, like `targets`: what is no padding."""
    if targets.dim() == 1:
        return torch.ones_like(targets, dtype=torch.bool)
    return torch.arange(targets.shape[1], device=targets.device) < lengths[:, None]


def _repeats(targets: Tensor, lengths: Tensor) -> Tensor:
    """`(samples,)`: how many labels equal the one before them. Each needs a blank, and so a step, between the two."""
    same = targets[..., 1:] == targets[..., :-1]
    if targets.dim() == 2:
        return (same & _used(targets, lengths)[:, 1:]).sum(1)
    upto = torch.nn.functional.pad(same.long().cumsum(0), (1, 0))  # upto[k]: among the labels 0 … k
    end = lengths.long().cumsum(0)
    first, last = end - lengths, end - 1
    most = targets.shape[0] - 1
    return torch.where(lengths > 1, upto[last.clamp(0, most)] - upto[first.clamp(0, most)], 0)


def _impossible(targets: Tensor, inputs: Tensor, lengths: Tensor) -> Tensor:
    return inputs < lengths + _repeats(targets, lengths)


def _count_impossible(targets: Tensor, inputs: Tensor, lengths: Tensor) -> tuple[Tensor | float]:
    if targets.is_cpu and int(inputs.min()) >= 2 * int(lengths.max()):  # enough for a blank before each label
        return (0.0,)
    return (_impossible(targets, inputs, lengths).sum(),)


def _judge_length(
    field: Field, inputs_field: Field, sure: bool, targets: Tensor, told: Answers, inputs: Tensor, lengths: Tensor
) -> list[BatchProblem]:
    bad = _impossible(targets, inputs, lengths)
    sample = int(bad.to(torch.uint8).argmax())
    length, repeats = int(lengths[sample]), int(_repeats(targets, lengths)[sample])
    blanks = f" and {repeats} blank{'s' * (repeats > 1)} between equal neighbours" if repeats else ""
    reason = (
        f"{field.name}: sample {sample} has {length} labels{blanks}, {inputs_field.path}[{sample}] is "
        f"{int(inputs[sample])} steps; {int(told[0])} of {len(lengths)} bad. No CTC alignment is that short, the loss "
        "is Inf: drop such samples, subsample less, or give the loss zero_infinity=True"
    )
    path = f"{field.path}[{sample}]" if targets.dim() == 2 else field.path
    severity = "error" if sure else "warning"
    return [BatchProblem(path, reason, int(told[0]), None, severity, "length", field.field)]  # type: ignore[arg-type]


def _ask_classes(targets: Placed, lengths: Placed, classes: int) -> Question:
    def bad(value: Tensor, lengths: Tensor) -> Tensor:
        return ((value < 0) | (value >= classes)) & _used(value, lengths)

    def judge(value: Tensor, told: Answers, lengths: Tensor) -> list[BatchProblem]:
        count, index, path, within = targets[1].first(bad(value, lengths))
        reason = (
            f"{targets[1].name}{list(index)} is {int(value[index])}, the log-probabilities are of {classes} classes "
            f"(0..{classes - 1}); {count} of {value.numel()} bad. The loss reads other memory for them"
        )
        return [BatchProblem(path, reason, count, within, "error", "label", targets[1].field)]

    def count(value: Tensor, lengths: Tensor) -> tuple[Tensor | float]:
        low, high = torch.aminmax(value)
        within = value.is_cpu and int(low) >= 0 and int(high) < classes
        return (0.0,) if within else (bad(value, lengths).sum(),)

    return Question(targets[0], count, judge, (0, 0), "beside", (lengths[0],))


def _ask_blank(targets: Placed, lengths: Placed, blank: Placed | None) -> list[Question]:
    """Only where the batch itself says which label is the blank: it is the first or the last one as a rule."""
    if blank is None or blank[1].shape:
        return []

    def bad(value: Tensor, lengths: Tensor, blank: Tensor) -> Tensor:
        return (value == blank) & _used(value, lengths)

    def judge(value: Tensor, told: Answers, lengths: Tensor, blank: Tensor) -> list[BatchProblem]:
        count, index, path, within = targets[1].first(bad(value, lengths, blank))
        reason = (
            f"{targets[1].name}{list(index)} is {int(blank)}, the blank; {count} of {value.numel()} bad. A target "
            "holds no blank: number the labels around it, or pad behind target_lengths"
        )
        return [BatchProblem(path, reason, count, within, "error", "label", targets[1].field)]

    return [Question(targets[0], lambda *all: (bad(*all).sum(),), judge, (0, 0), "beside", (lengths[0], blank[0]))]
