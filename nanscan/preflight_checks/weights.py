"""Initial weights: NaN, all zero, all rows equal, normal with a standard deviation of 1, not there yet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nanscan import engine
from nanscan.engine.result import BadInput, Row
from nanscan.names import label_of
from nanscan.preflight_checks.codes import found
from nanscan.preflight_checks.finding import Finding
from nanscan.preflight_checks.subject import Subject
from nanscan.report import Report

__all__ = ["check_weights", "zero_matrices"]

_UNIT = (0.8, 1.25)  # a standard deviation of about 1
_LARGE_GAIN = 3.0  # std * sqrt(fan_in): what a layer multiplies by; 0.6 for PyTorch's own, 1 for Xavier, 1.4 for He
_DEEP = 3  # layers from which on gains multiply up


def check_weights(subject: Subject, grads: Mapping[str, Tensor | None]) -> Iterator[Finding]:
    """Judge the weights as they are now.

    Args:
        grads: of a first pass by name; {} if there was none.
    """
    yield from _unready(subject)
    rows = _rows(subject.ready)
    yield from _nonfinite(subject, rows)
    yield from _zero(subject, rows, grads)
    yield from _equal_rows(subject, rows)
    yield from _unit_normal(subject, rows)
    yield from _unit_output_embedding(subject, rows)


def _unready(subject: Subject) -> Iterator[Finding]:
    lazy = {id(p) for p in subject.named.values() if is_lazy(p)}
    for name, param in subject.named.items():
        if id(param) in lazy:
            yield found("NS106", name, "is lazy and has no shape yet; neither it nor a first step could be checked")
            continue
        if param.is_meta:
            yield found("NS106", name, f"{list(param.shape)} is on the meta device and has no values")


def _rows(params: Mapping[str, Tensor]) -> dict[str, Row]:
    names = list(params)
    try:
        scan = engine.scan([params[name] for name in names])
    except BadInput:  # quantized, or a subclass without plain memory
        return {}
    return {names[position]: row for row in scan.rows() for position in (row.position, *row.also)}


def _nonfinite(subject: Subject, rows: Mapping[str, Row]) -> Iterator[Finding]:
    bad = [name for name, row in rows.items() if row.nan_count or row.inf_count]
    if bad:
        params = [subject.ready[name] for name in bad]
        labels = [label_of(p, (name,), "parameter") for name, p in zip(bad, params, strict=True)]
        for row in Report.from_scan(engine.scan(params), labels).bad:
            yield found("NS101", row.name, row.describe().partition("has ")[2] or row.describe())


def zero_matrices(subject: Subject) -> list[str]:
    """Names of the layers' weights that are all zero."""
    rows = _rows(subject.matrices)
    return [name for name, row in rows.items() if _is_zero(row)]


def _is_zero(row: Row) -> bool:
    return row.inf_norm == 0 and not row.nan_count and not row.inf_count


def _zero(subject: Subject, rows: Mapping[str, Row], grads: Mapping[str, Tensor | None]) -> Iterator[Finding]:
    """A layer that starts at 0 on purpose learns: it gets a gradient, or it is the last one."""
    matrices = list(subject.matrices)
    for name in matrices:
        if name not in rows or not _is_zero(rows[name]) or not subject.ready[name].numel():
            continue
        grad = grads.get(name)
        learns = grad is not None and bool((grad != 0).any()) if grads else name == matrices[-1]
        text = f"all {subject.ready[name].numel()} elements are 0"
        if learns:
            yield found("NS102", name, f"{text}; it learns, as a layer that starts at 0 on purpose", severity="info")
        else:
            yield found("NS102", name, f"{text}{' and it gets no gradient' if grads else ''}")


def _equal_rows(subject: Subject, rows: Mapping[str, Row]) -> Iterator[Finding]:
    for name, param in subject.matrices.items():
        if param.shape[0] < 2 or name not in rows or _is_zero(rows[name]):
            continue
        first = param.detach()[:1]
        if not bool((param.detach()[1:2] == first).all()):  # nearly always: read one row, not all
            continue
        if bool((param.detach() == first).all()):
            value = f"; every element is {float(first.flatten()[0]):.4g}" if _constant(first) else ""
            yield found("NS103", name, f"all {param.shape[0]} rows are equal{value}")


def _constant(row: Tensor) -> bool:
    return bool((row == row.flatten()[0]).all())


def _std(row: Row, numel: int) -> float:
    """The root mean square, which is the standard deviation of weights around 0."""
    return row.finite_norm / math.sqrt(numel) if numel else 0.0


def _fan_in(param: Tensor) -> int:
    return math.prod(param.shape[1:])


def _unit_normal(subject: Subject, rows: Mapping[str, Row]) -> Iterator[Finding]:
    """Standard deviation 1 where 1/sqrt(fan_in) is right, in nets that are deep enough for it to multiply up."""
    tables, wide = _tables(subject), {**subject.matrices, **_own_matrices(subject)}
    if len(wide) < _DEEP:
        return
    for name, param in wide.items():
        if id(param) in tables:  # tied: the embedding is judged by itself
            continue
        std = _std(rows[name], param.numel()) if name in rows else 0.0
        fan_in = min(param.shape) if name not in subject.matrices else _fan_in(param)
        gain = std * math.sqrt(fan_in)
        if _UNIT[0] < std < _UNIT[1] and gain > _LARGE_GAIN:
            text = f"standard deviation {std:.3g} with {fan_in} inputs: outputs {gain:.3g} times as large as the inputs"
            yield found("NS104", name, text)


def _own_matrices(subject: Subject) -> dict[str, nn.Parameter]:
    """Matrices that a model's own modules multiply by: both sizes large, and no table of tokens or positions."""
    tables = _tables(subject)
    words = ("pos", "emb", "token", "query", "queries", "latent", "table", "codebook", "memory", "prompt")
    return {
        name: p
        for name, p in subject.ready.items()
        if p.dim() == 2
        and min(p.shape) > _LARGE_GAIN**2
        and id(p) not in tables
        and not any(word in name.lower() for word in words)
    }


def _tables(subject: Subject) -> set[int]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(p) for m in subject.model.modules() if isinstance(m, kinds) for p in m.parameters()}


def _unit_output_embedding(subject: Subject, rows: Mapping[str, Row]) -> Iterator[Finding]:
    """PyTorch's default for an embedding, where the same weights make the logits."""
    layers = {id(m._parameters.get("weight")) for m in subject.model.modules() if isinstance(m, nn.Linear)}
    for path, module in subject.model.named_modules():
        weight = module._parameters.get("weight")  # to ask for .weight runs a parametrization, such as spectral_norm
        if not isinstance(module, nn.Embedding) or weight is None or id(weight) not in layers or weight.is_meta:
            continue
        name = subject.name_of(weight, path)
        std = _std(rows[name], weight.numel()) if name in rows else 0.0
        if _UNIT[0] < std < _UNIT[1] and _fan_in(weight) > _LARGE_GAIN**2:
            others = [n for n in subject.names[id(weight)] if n != name]
            yield found("NS105", name, f"standard deviation {std:.3g}, width {_fan_in(weight)}, tied to {others[0]}")
