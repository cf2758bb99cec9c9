"""Labels of a language model, which are tokens: those beyond the vocabulary, and samples without any."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from nanscan.batches.fields import Field, Placed, is_int
from nanscan.batches.problem import BatchProblem
from nanscan.batches.question import Answers, Question
from nanscan.batches.quick import Quick
from nanscan.batches.spec import BatchSpec

__all__ = ["ask_next_tokens"]


def ask_next_tokens(readable: Sequence[Placed], spec: BatchSpec) -> list[Question]:
    """Labels beside tokens of the same shape: is each a token, and has each sample one that is not ignored?"""
    if len(spec.ignored) > 1:
        return []
    ignored = spec.ignored[0] if spec.ignored else None
    return [
        question
        for i, labels in readable
        if labels.role == "label" and is_int(labels.dtype) and spec.known_of(labels.field) is None
        for tokens in _tokens_beside(labels, readable)
        for question in (*_ask_range(i, labels, tokens, ignored, spec), *_ask_rows(i, labels, tokens, ignored))
    ]


def _ask_range(i: int, labels: Field, tokens: int, ignored: int | None, spec: BatchSpec) -> Iterator[Question]:
    """Where the vocabulary is known, and no number of classes."""
    size = spec.vocab_size
    if size is not None and spec.num_classes is None:
        judge = partial(_judge, labels, size, spec)
        quick = Quick("within", 0.0, size - 1.0, ignored)
        yield Question(i, partial(_count_bad, size, ignored), judge, (0, 0), quick, (tokens,))


def _ask_rows(i: int, labels: Field, tokens: int, ignored: int | None) -> Iterator[Question]:
    """Tokens are not negative, so a row of an ignored index that is has a negative maximum."""
    if ignored is not None and ignored < 0 and labels.dtype is not torch.uint8 and labels.shape[0] > 1:
        yield Question(i, _least_maximum, partial(_judge_rows, labels, ignored), (0, math.inf), "beside", (tokens,))


def _least_maximum(labels: Tensor, tokens: Tensor) -> tuple[Tensor | float]:
    least = labels.amax(1).amin()
    return (least.item() if least.is_cpu else least,)


def _judge_rows(field: Field, ignored: int, labels: Tensor, told: Answers, tokens: Tensor) -> list[BatchProblem]:
    """Only of a language model: of tokens that were masked at random, a short text may have none."""
    left_out = labels == ignored
    rows = left_out.all(1)
    if not bool(rows.any()) or not _repeat(labels, tokens, left_out):
        return []
    count, (row,), path, _ = field.first(rows)
    reason = (
        f"{field.name}: sample {row} has no target, all {labels.shape[1]} are {ignored} ({count} of {len(rows)} "
        "samples are so). Nothing is learnt from it, and a mean over its own tokens is 0/0 = NaN: did a long prompt "
        "leave no room for the answer?"
    )
    return [BatchProblem(path, reason, count, None, "warning", "no_target", field.field)]


def _tokens_beside(labels: Field, readable: Sequence[Placed]) -> list[int]:
    """The only tokens there are, if they have the labels' shape: two would be those of an encoder and a decoder."""
    beside = [(i, f) for i, f in readable if f.role == "token" and f.steps[:-1] == labels.steps[:-1]]
    fits = len(beside) == 1 and len(labels.shape) == 2 and beside[0][1].shape == labels.shape
    return [beside[0][0]] if fits else []


def _bad(size: int, ignored: int | None, labels: Tensor) -> Tensor:
    bad = (labels < 0) | (labels >= size)
    return bad if ignored is None else bad & (labels != ignored)


def _count_bad(size: int, ignored: int | None, labels: Tensor, tokens: Tensor) -> tuple[Tensor]:
    return (_bad(size, ignored, labels).sum(),)


def _judge(
    field: Field, size: int, spec: BatchSpec, labels: Tensor, told: Answers, tokens: Tensor
) -> list[BatchProblem]:
    """The labels may be of another kind (tags, another language): they are tokens where most repeat the input's."""
    ignored = spec.ignored[0] if spec.ignored else None
    bad = _bad(size, ignored, labels)
    if not bool(bad.any()) or not _repeat(labels, tokens, bad if ignored is None else bad | (labels == ignored)):
        return []
    count, index, path, within = field.first(bad)
    first = int(labels[index])
    ignore = f"; if {first} is padding, fill labels with {ignored} instead" if ignored is not None else ""
    source = spec.source("vocab_size")
    reason = (
        f"{field.name}: sample {index[0]} at {list(index[1:])} has {first}, the tokens are of a vocabulary of {size} "
        f"(0..{size - 1}){f', that of {source}' if source else ''}; {count} of {labels.numel()} bad{ignore}"
    )
    return [BatchProblem(path, reason, count, within, "error", "label", field.field)]


def _repeat(labels: Tensor, tokens: Tensor, left_out: Tensor) -> bool:
    """Do most of the labels equal the token at their place, or the next one?"""
    valid = ~left_out
    here = (labels == tokens) & valid
    after = (labels[:, :-1] == tokens[:, 1:]) & valid[:, :-1]
    equal = torch.maximum(here.sum(), after.sum())
    return bool((2 * equal > valid.sum()) & valid.any())
