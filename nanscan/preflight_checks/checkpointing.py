"""Checkpoints: can the model be pickled, is the scheduler's state all there, is there room on the disk."""

from __future__ import annotations

import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanscan.preflight_checks.codes import found
from nanscan.preflight_checks.finding import Finding
from nanscan.preflight_checks.subject import Subject

__all__ = ["check_checkpointing"]

_STATES = {
    "SGD": 1,
    "RMSprop": 1,
    "Adagrad": 1,
    "Lion": 1,
    "Muon": 1,
}  # tensors per parameter; of others 2, as Adam has
_MOST_PLACES = 5


def check_checkpointing(subject: Subject) -> Iterator[Finding]:
    """Judge what saving will meet."""
    yield from _pickling(subject)
    yield from _lambdas(subject.scheduler)
    yield from _disk(subject)


def _pickling(subject: Subject) -> Iterator[Finding]:
    from nanscan.pickling import find_unpicklable

    problems = find_unpicklable(subject.model, name="model", check_loading=False)
    for problem in problems[:_MOST_PLACES]:
        yield found("NS801", problem.path, f"{problem.type}: {problem.reason}")


def _lambdas(scheduler: Any, place: str = "scheduler") -> Iterator[Finding]:
    if scheduler is None:
        return
    functions = [f for f in getattr(scheduler, "lr_lambdas", ()) if isinstance(f, types.FunctionType)]
    if functions:
        name = functions[0].__qualname__
        yield found("NS802", place, f"{len(functions)} of its functions, such as {name}, are left out by state_dict()")
    for number, inner in enumerate(getattr(scheduler, "_schedulers", ())):
        yield from _lambdas(inner, f"{place}._schedulers[{number}]")


def _disk(subject: Subject) -> Iterator[Finding]:
    weights = sum(p.numel() * p.element_size() for p in subject.ready.values())
    state = 0
    if subject.optimizer is not None:
        kinds = [cls.__name__ for cls in type(subject.optimizer).__mro__]
        state = next((_STATES[kind] for kind in kinds if kind in _STATES), 2)
    size, folder = weights * (1 + state), Path.cwd()
    free = shutil.disk_usage(folder).free
    if free < 2 * size:
        text = f"two checkpoints of about {size / 1e9:.3g} GB have to fit in {free / 1e9:.3g} GB that are free"
        yield found("NS803", str(folder), text)
