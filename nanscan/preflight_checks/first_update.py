"""The first update, made on copies: how large it is against the weights, and whether any of it arrives."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanscan.policy import clip_factor
from nanscan.preflight_checks.codes import found
from nanscan.preflight_checks.finding import Finding
from nanscan.preflight_checks.subject import Subject
from nanscan.rng import rng_state, set_rng_state

__all__ = ["check_first_update"]

_ONE_WEIGHT = 1.0  # an update as large as the weight itself
_ALL = 0.3
_ARRIVED = 0.01


class _Step(NamedTuple):
    name: str
    ratio: float
    update: float
    weight: float
    arrived: int
    wanted: int


def check_first_update(subject: Subject, grads: Mapping[str, Tensor | None]) -> Iterator[Finding]:
    """Step a copy of the optimizer with the gradients of the first pass and compare."""
    if subject.optimizer is None or not grads or isinstance(subject.optimizer, torch.optim.LBFGS):
        return
    steps = _try_step(subject, grads)
    weights = [step for step in steps if step.weight > 0]
    if not weights:
        return
    worst = max(weights, key=lambda step: step.ratio)
    ratio = sum(s.update**2 for s in weights) ** 0.5 / sum(s.weight**2 for s in weights) ** 0.5
    if worst.ratio > _ONE_WEIGHT or ratio > _ALL:
        text = f"the first update has {worst.ratio:.3g} times its norm ({worst.update:.3g} against {worst.weight:.3g})"
        yield found("NS303", worst.name, f"{text}; all weights together: {ratio:.3g} times")
    yield from _rounded(steps)


def _rounded(steps: list[_Step]) -> Iterator[Finding]:
    wanted, arrived = sum(step.wanted for step in steps), sum(step.arrived for step in steps)
    if wanted and arrived < _ARRIVED * wanted:
        text = f"{arrived} of {wanted} weights with a gradient change in the first update: the rest is rounded away"
        yield found("NS304", max(steps, key=lambda step: step.wanted).name, text)


def _try_step(subject: Subject, grads: Mapping[str, Tensor | None]) -> list[_Step]:
    """[] where the optimizer can't be copied, wants a closure, or its rate is 0 (the start of a warm-up)."""
    assert subject.optimizer is not None
    if not any(float(group.get("lr", 1.0)) for group in subject.optimizer.param_groups):
        return []
    state = rng_state()
    try:
        with torch.no_grad():
            copied = copy.deepcopy(subject.optimizer)
            pairs = _with_gradients(subject, copied, grads)
            copied.step()
            return [_compared(name, old, new, _given(grads, name)) for name, old, new in pairs]
    except Exception:  # whatever an optimizer of the user's own does with a copy is no finding
        return []
    finally:
        set_rng_state(state)


def _with_gradients(
    subject: Subject, copied: torch.optim.Optimizer, grads: Mapping[str, Tensor | None]
) -> list[tuple[str, Tensor, Tensor]]:
    assert subject.optimizer is not None
    groups = zip(subject.optimizer.param_groups, copied.param_groups, strict=True)
    pairs = [(a, b) for old, new in groups for a, b in zip(old["params"], new["params"], strict=True)]
    factor, bound = _clipping(subject, grads)
    named = []
    for old, new in pairs:
        grad = grads.get(subject.name_of(old, ""))
        new.grad = None
        if grad is not None and grad.layout is torch.strided:
            new.grad = (grad if bound is None else grad.clamp(-bound, bound)) * factor
            named.append((subject.name_of(old), old, new))
    return named


def _clipping(subject: Subject, grads: Mapping[str, Tensor | None]) -> tuple[float, float | None]:
    """What the guard would scale by, and bound elements to."""
    policy: Any = getattr(subject.guard, "policy", None)
    if policy is None or (policy.clip_norm is None and policy.clip_value is None):
        return 1.0, None
    norms = [float(torch.linalg.vector_norm(g.float())) for g in grads.values() if g is not None and not g.is_sparse]
    return clip_factor(sum(norm**2 for norm in norms) ** 0.5, policy.fixed_norm), policy.clip_value


def _given(grads: Mapping[str, Tensor | None], name: str) -> Tensor:
    grad = grads[name]
    assert grad is not None
    return grad


def _compared(name: str, old: Tensor, new: Tensor, grad: Tensor) -> _Step:
    wanted = grad != 0
    arrived, asked = int(((old != new) & wanted).sum()), int(wanted.sum())
    if old.dim() < 2:
        return _Step(name, 0.0, 0.0, 0.0, arrived, asked)
    weight = float(torch.linalg.vector_norm(old.float()))
    update = float(torch.linalg.vector_norm(new.float() - old.float()))
    return _Step(name, update / weight if weight else 0.0, update, weight, arrived, asked)
