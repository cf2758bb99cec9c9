"""Labels of a language model, which are tokens: those beyond the vocabulary, where that is all that is known."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Labels beside tokens of the same shape, with a vocabulary and no number of classes given."""
    size = spec.vocab_size
    if size is None or spec.num_classes is not None or len(spec.ignored) > 1:
        return []
    ignored = spec.ignored[0] if spec.ignored else None
    return [
        Question(
            i,
            partial(_count_bad, size, ignored),
            partial(_judge, labels, size, spec),
            (0, 0),
            Quick("within", 0.0, size - 1.0, ignored),
            (tokens,),
        )
        for i, labels in readable
        if labels.role == "label" and is_int(labels.dtype) and spec.known_of(labels.field) is None
        for tokens in _tokens_beside(labels, readable)
    ]


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
