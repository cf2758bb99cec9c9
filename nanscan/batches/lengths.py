"""Lengths held against the padded or joined sequences that they are the lengths of."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from nanscan.batches.fields import Field, Placed, families, is_int
from nanscan.batches.problem import BatchProblem
from nanscan.batches.question import Answers, Question
from nanscan.batches.quick import Quick
from nanscan.batches.spec import BatchSpec

__all__ = ["LOG_PROBS", "ask_lengths"]

LOG_PROBS = ("log_probs", "logprobs", "log_probabilities")
_JOINED = ("target", "label")  # which a CTC loss takes one after another; others may be filled up to a length
_NAME = re.compile(
    r"(inputs?|src|source|tgt|trg|targets?|labels?|features?|x|tokens?|seqs?|sequences?|log_?probs)"
    r"_?(lengths?|lens?)"
)


def ask_lengths(readable: Sequence[Placed], spec: BatchSpec) -> list[Question]:
    """For lengths that are named after a field beside them: does that field have so many steps?"""
    return [
        question
        for family in families(readable).values()
        for name, (i, lengths) in family.items()
        if (match := _NAME.fullmatch(name)) and is_int(lengths.dtype) and len(lengths.shape) == 1
        for other in _named_after(match[1], family)
        for question in _ask(i, lengths, other, match[1].removesuffix("s") in _JOINED)
    ]


def _named_after(stem: str, family: dict[str, Placed]) -> Iterator[Field]:
    """`targets` for `target_lengths`; also the outputs of a model, whose steps are what `input_lengths` count."""
    single = stem.removesuffix("s")
    names = [single, f"{single}s", f"{single}_ids", f"{single}_tokens", stem]
    names += LOG_PROBS if single == "input" else ()
    for name in dict.fromkeys(names):
        if name in family:
            yield family[name][1]


def _ask(i: int, lengths: Field, other: Field, joined: bool) -> Iterator[Question]:
    count = lengths.shape[0]
    if not other.batched or not lengths.batched:
        return
    if joined and len(other.shape) == 1 and is_int(other.dtype) and other.shape[0] != count:
        total = float(other.shape[0])
        yield Question(i, lambda value: (value.sum(),), partial(_judge_total, lengths, other), (total, total), "beside")
    most = _steps_of(other, count)
    if most is not None:
        quick = Quick("within", -math.inf, float(most))
        judge = partial(_judge_most, lengths, other, most)
        yield Question(i, lambda value: (value.max(),), judge, (-math.inf, most), quick)


def _steps_of(field: Field, count: int) -> int | None:
    """How many steps sequences in a padded tensor can have at most; None where its dimensions don't tell."""
    if len(field.shape) < 2 or count not in field.shape[:2]:
        return None
    if field.name.lower() in LOG_PROBS:  # (steps, samples, classes); samples first they may be those of a decoder
        return field.shape[0] if field.shape[1] == count != field.shape[0] else None
    batch = 0 if field.shape[0] == count else 1
    return max(size for dim, size in enumerate(field.shape) if dim != batch)


def _judge_most(lengths: Field, other: Field, most: int, value: Tensor, told: Answers) -> list[BatchProblem]:
    bad = value > most
    count, index, path, within = lengths.first(bad)
    reason = (
        f"{lengths.name}: sample {index[0]} has length {int(value[index])}, {other.path} has {most} steps (shape "
        f"{other.shape}); {count} of {value.numel()} bad. Count the lengths after cropping and resampling, not before"
    )
    severity = "error" if is_int(other.dtype) or other.name.lower() in LOG_PROBS else "warning"
    return [BatchProblem(path, reason, count, within, severity, "length", lengths.field)]  # type: ignore[arg-type]


def _judge_total(lengths: Field, other: Field, value: Tensor, told: Answers) -> list[BatchProblem]:
    reason = (
        f"add up to {int(told[0])}, {other.path}, which holds all sequences one after another, has {other.shape[0]} "
        "elements: every sample from there on would get another's. Make both from the same samples in the same order"
    )
    return [BatchProblem(lengths.path, reason, 1, None, "error", "length", lengths.field)]
