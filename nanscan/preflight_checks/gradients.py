"""Gradients of the first pass: none at all, exactly 0, vanishing or exploding over the layers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from nanscan.engine.result import BadInput
from nanscan.preflight_checks.codes import found
from nanscan.preflight_checks.finding import Finding
from nanscan.preflight_checks.first_pass import Pass
from nanscan.preflight_checks.parameters import listed
from nanscan.preflight_checks.subject import Subject, plural
from nanscan.preflight_checks.weights import zero_matrices

__all__ = ["check_gradients"]

_RATIO = 1e6


def check_gradients(subject: Subject, done: Pass) -> Iterator[Finding]:
    """Judge the gradients of a pass; nothing to say where there was no backward."""
    if not done.grads:
        return
    yield from _unused(done)
    sizes = _sizes(subject, done)
    yield from _zero(subject, sizes)
    if all(math.isfinite(size) for size in sizes.values()):
        yield from _scale(subject, sizes, done.order)


def _unused(done: Pass) -> Iterator[Finding]:
    unused = [name for name, grad in done.grads.items() if grad is None]
    if unused:
        text = f"{plural(len(unused), 'trainable parameter')} without a gradient on this batch: {listed(unused)}"
        yield found("NS205", unused[0], text, severity="error" if len(unused) == len(done.grads) else None)


def _sizes(subject: Subject, done: Pass) -> dict[str, float]:
    """The largest magnitude in the gradient of each layer's weight, by one scan."""
    from nanscan import engine

    held = {name: grad for name in subject.matrices if (grad := done.grads.get(name)) is not None}
    try:
        scan = engine.scan(list(held.values()))
    except BadInput:
        return {}
    names, sizes = list(held), {}
    for row in scan.rows():
        for position in (row.position, *row.also):
            sizes[names[position]] = math.nan if row.nan_count or row.inf_count else row.inf_norm
    return sizes


def _zero(subject: Subject, sizes: dict[str, float]) -> Iterator[Finding]:
    """Before a layer that starts at 0, gradients are 0 in the first step and not in the second."""
    zero = [name for name, size in sizes.items() if size == 0]
    if not zero:
        return
    text = f"the gradient of {plural(len(zero), 'weight')} is exactly 0 on this batch: {listed(zero)}"
    starts_at_zero = [name for name in zero_matrices(subject) if sizes.get(name)]
    if starts_at_zero or _constant_scale(subject) == 0:
        yield found("NS206", zero[0], f"{text}; a layer or gain that starts at 0 follows", severity="info")
    else:
        yield found("NS206", zero[0], text)


def _scale(subject: Subject, sizes: dict[str, float], order: list[str]) -> Iterator[Finding]:
    """Each layer's gradient against that of the layer nearest to the loss."""
    ordered = _in_order(subject, sizes, order)
    if len(ordered) < 2:
        return
    last, reference = ordered[-1], sizes[ordered[-1]]
    least = min(ordered, key=lambda name: sizes[name])
    most = max(ordered, key=lambda name: sizes[name])
    gain = min(_constant_scale(subject) or 1.0, 1.0)
    if sizes[least] < reference / _RATIO * gain:
        text = (
            f"its gradient is at most {sizes[least]:.3g}, that of {last} {reference:.3g}: it vanishes on the way back"
        )
        yield found("NS412", least, text)
    if sizes[most] > reference * _RATIO / gain:
        text = f"its gradient is up to {sizes[most]:.3g}, that of {last} {reference:.3g}: it explodes on the way back"
        yield found("NS412", most, text)


def _in_order(subject: Subject, sizes: dict[str, float], order: list[str]) -> list[str]:
    place = {path: i for i, path in enumerate(order)}
    known = [name for name, size in sizes.items() if size > 0]
    return sorted(known, key=lambda name: place.get(name.rpartition(".")[0] or "model", -1))


def _constant_scale(subject: Subject) -> float | None:
    """The smallest gain that a residual branch starts with (LayerScale: 1e-6; a zeroed BatchNorm: 0), if any."""
    gains = [gain for name, p in subject.ready.items() if p.dim() <= 1 and (gain := _gain(name, p)) is not None]
    return min(gains, default=None)


def _gain(name: str, param: Tensor) -> float | None:
    if name.rpartition(".")[2].startswith("bias") or not param.numel():
        return None
    largest = float(param.detach().abs().max())
    return largest if largest < 0.01 else None
