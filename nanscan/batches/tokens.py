"""Token, type and position ids within their tables; sequences that are not empty, nor longer than the table."""

from __future__ import annotations

from torch import Tensor

from nanscan.batches.fields import Field
from nanscan.batches.problem import BatchProblem
from nanscan.batches.spec import BatchSpec

__all__ = ["judge_ids", "judge_lengths", "too_long"]


def judge_ids(field: Field, value: Tensor, low: float, high: float, spec: BatchSpec) -> list[BatchProblem]:
    """Ids whose least and largest value are `low` and `high`."""
    size = spec.rows_of(field.role)
    if size is None or (low >= 0 and high < size):
        return []
    bad = (value < 0) | (value >= size)
    count, index, path, within = field.first(bad)
    first = int(value[index])
    table = {"token": f"vocabulary {size}", "type": f"{size} token types"}.get(field.role, f"{size} positions")
    where = ", ".join(map(str, (*field.place, *index)))
    reason = (
        f"{field.name}[{where}] = {first}{' (negative)' if first < 0 else ''}, {table} "
        f"(max {size - 1}); {count} of {value.numel()} bad{_guess(first, size, field, spec)}{_source(spec, field)}"
    )
    return [BatchProblem(path, reason, count, within, "error", "token", field.field)]


def _source(spec: BatchSpec, field: Field) -> str:
    source = spec.source({"token": "vocab_size", "type": "token_types"}.get(field.role, "max_positions"))
    return f"; the table is that of {source}" if source else ""


def _guess(first: int, size: int, field: Field, spec: BatchSpec) -> str:
    if first in spec.ignored:
        return f"; {first} is the ignore index of labels: pad inputs with the tokenizer's padding id"
    if field.role == "token" and first >= size:
        return "; if tokens were added to the tokenizer, enlarge the model's table (resize_token_embeddings)"
    return ""


def judge_lengths(field: Field, value: Tensor) -> list[BatchProblem]:
    """Lengths of sequences, of which one is 0 or negative."""
    bad = value <= 0
    count, index, path, within = field.first(bad)
    first = int(value[index])
    reason = (
        f"{field.name}: sample {index[0]} has length {first}; {count} of {value.numel()} bad. pack_padded_sequence "
        "refuses it, and a mean over its steps is 0/0 = NaN: drop empty sequences"
    )
    severity = "error" if first < 0 else "warning"
    return [BatchProblem(path, reason, count, within, severity, "length", field.field)]  # type: ignore[arg-type]


def too_long(field: Field, spec: BatchSpec) -> list[BatchProblem]:
    """Sequences longer than the position table, told from the shape.

    The length is the last dimension; where the model may take (time, batch), it is at least the smaller one.
    """
    if spec.max_positions is None or not field.shape:
        return []
    length = min(field.shape[-2:]) if spec.source("time_first") else field.shape[-1]
    most, source = spec.max_positions, spec.source("max_positions")
    if length <= most:
        return []
    reason = (
        f"sequence length {length} > {most} positions{f' ({source})' if source else ''}: truncate to {most}, or "
        "enlarge the position table"
    )
    return [BatchProblem(field.path, reason, length - most, None, "error", "length", field.field)]
