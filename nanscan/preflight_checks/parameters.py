"""Parameters: in the optimizer or not, twice, frozen, tied, somebody else's, on which device; the model's mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from nanscan.preflight_checks.codes import found
from nanscan.preflight_checks.finding import Finding
from nanscan.preflight_checks.subject import Subject, plural

__all__ = ["check_parameters", "listed"]


def check_parameters(subject: Subject) -> Iterator[Finding]:
    """Judge which parameters there are and who has them."""
    yield from _tied(subject)
    yield from _devices(subject)
    if not subject.model.training:
        yield found("NS209", type(subject.model).__name__, "model.training is False")
    if subject.optimizer is not None:
        yield from _membership(subject)
        yield from _twice(subject)
        yield from _frozen(subject)


def listed(names: Sequence[str], limit: int = 4) -> str:
    """Names in one line, the first few of them.

    >>> listed(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _tied(subject: Subject) -> Iterator[Finding]:
    for param in subject.named.values():
        names = subject.names.get(id(param), ())
        if len(names) > 1:
            yield found("NS207", names[0], f"is also {listed(names[1:])}")


def _devices(subject: Subject) -> Iterator[Finding]:
    """The CPU beside a GPU is a mistake; several GPUs are a model in parts."""
    tensors: list[tuple[str, Tensor]] = [*subject.named.items(), *subject.model.named_buffers()]
    first: dict[Any, str] = {}
    for name, tensor in tensors:
        first.setdefault(tensor.device, name)
    if len(first) > 1:
        places = listed([f"{name} on {device}" for device, name in first.items()])
        several = len({device.type for device in first}) > 1
        where = list(first.values())[1]
        yield found("NS208", where, places, severity="error" if several else "info")


def _held(subject: Subject) -> list[Tensor]:
    return [param for _, group in subject.groups() for param in group["params"]]


def _membership(subject: Subject) -> Iterator[Finding]:
    held, own = {id(p) for p in _held(subject)}, {id(p) for p in subject.named.values()}
    wanted = {name: p for name, p in subject.named.items() if p.requires_grad}
    missing = [name for name, p in wanted.items() if id(p) not in held]
    foreign = len(held - own - _of_loss(subject))
    if wanted and len(missing) == len(wanted):
        text = f"it has {plural(len(held), 'parameter')}, none of the model's {len(wanted)} trainable ones"
        yield found("NS204", "optimizer", text)
        return
    if missing:
        yield found("NS201", missing[0], f"{plural(len(missing), 'parameter')} not in the optimizer: {listed(missing)}")
    if foreign and subject.forward is None:
        text = f"{plural(foreign, 'parameter')} of the optimizer not in the model"
        yield found("NS204", "optimizer", text, severity="info")


def _of_loss(subject: Subject) -> set[int]:
    return {id(p) for p in subject.loss_fn.parameters()} if isinstance(subject.loss_fn, nn.Module) else set()


def _twice(subject: Subject) -> Iterator[Finding]:
    counts = Counter(id(param) for param in _held(subject))
    params = {id(param): param for param in _held(subject)}
    for key, count in counts.items():
        if count > 1:
            places = [place for place, group in subject.groups() for p in group["params"] if id(p) == key]
            yield found("NS202", subject.name_of(params[key]), f"is {count} times in the optimizer: {listed(places)}")


def _frozen(subject: Subject) -> Iterator[Finding]:
    frozen = [subject.name_of(param) for param in _held(subject) if not param.requires_grad]
    if frozen:
        yield found("NS203", frozen[0], f"{plural(len(frozen), 'frozen parameter')} in the optimizer: {listed(frozen)}")
