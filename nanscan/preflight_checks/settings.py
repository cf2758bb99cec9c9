"""Settings of the optimizer: eps, learning rate, clipping, warm-up, weight decay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanscan.names import dtype_name
from nanscan.policy import eps_is_lost
from nanscan.preflight_checks.codes import found
from nanscan.preflight_checks.finding import Finding
from nanscan.preflight_checks.parameters import listed
from nanscan.preflight_checks.subject import Subject, plural

__all__ = ["check_settings"]

# (least, most) of what is usual: the papers' and PyTorch's own examples with an order of magnitude around them
# fmt: off
_RATES = {
    "Adam": (1e-7, 2e-2), "AdamW": (1e-7, 2e-2), "NAdam": (1e-7, 2e-2), "RAdam": (1e-7, 2e-2), "Adamax": (1e-7, 5e-2),
    "SparseAdam": (1e-7, 5e-2), "RMSprop": (1e-7, 2e-2), "SGD": (1e-6, 5.0), "Adagrad": (1e-5, 1.0),
    "Adadelta": (1e-3, 10.0), "Lion": (1e-8, 2e-3), "Muon": (1e-5, 0.2), "ASGD": (1e-6, 5.0), "LBFGS": (1e-4, 2.0),
    "Rprop": (1e-6, 0.5),
}
# fmt: on
_FINE_TUNING = {"Adam": 1e-3, "AdamW": 1e-3, "NAdam": 1e-3, "RAdam": 1e-3, "RMSprop": 1e-3, "SGD": 0.1, "Lion": 1e-4}
_ADAMS = frozenset({"Adam", "AdamW", "NAdam", "Adamax"})  # RAdam has its warm-up built in
_DEEP = 4  # attention layers


def check_settings(subject: Subject, trained: tuple[float, int] | None = None) -> Iterator[Finding]:
    """Judge the optimizer's settings.

    Args:
        trained: (cross-entropy, classes) of a model that is trained already, as its loss tells.
    """
    if subject.optimizer is None:
        return
    kind = _kind(subject.optimizer)
    for place, group in subject.groups():
        yield from _eps(subject, place, group)
        yield from _rate(kind, place, group)
        yield from _fine_tuning(kind, place, group, trained)
    yield from _decay(subject)
    yield from _clipping(subject)
    yield from _warm_up(subject, kind)


def _kind(optimizer: Any) -> str:
    """The name of the nearest class that is known, so that a subclass counts as what it is made from."""
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    return next((name for name in names if name in _RATES), names[0])


def _eps(subject: Subject, place: str, group: dict[str, Any]) -> Iterator[Finding]:
    lost = [subject.name_of(p) for p in group["params"] if eps_is_lost(group, dtype_name(p.dtype))]
    if lost:
        where = f"is 0 in float16, the dtype of {listed(lost)}" if group["eps"] else f"for {listed(lost)}"
        text = f"eps={group['eps']:g} {where}: the update divides by 0"
        yield found("NS301", place, text)


def _peak(group: dict[str, Any]) -> float:
    """The rate that a schedule goes to, as far as the group knows it."""
    known = [group.get(name) for name in ("lr", "initial_lr", "max_lr")]
    return max([float(rate) for rate in known if rate is not None], default=0.0)


def _rate(kind: str, place: str, group: dict[str, Any]) -> Iterator[Finding]:
    if kind not in _RATES or "lr" not in group or not group["params"]:
        return
    low, high = _RATES[kind]
    rate = _peak(group)
    if not low <= rate <= high:
        yield found("NS302", place, f"lr={rate:g}; usual for {kind} is {low:g} to {high:g}")


def _fine_tuning(kind: str, place: str, group: dict[str, Any], trained: tuple[float, int] | None) -> Iterator[Finding]:
    most = _FINE_TUNING.get(kind)
    if trained is None or most is None or _peak(group) < most:
        return
    loss, classes = trained
    text = f"lr={_peak(group):g}, and the first loss {loss:.3g} for {classes} classes says that the model is trained"
    yield found("NS305", place, text)


def _decay(subject: Subject) -> Iterator[Finding]:
    for place, group in subject.groups():
        if not group.get("weight_decay"):
            continue
        small = [subject.name_of(p) for p in group["params"] if p.dim() < 2]
        if small:
            text = f"weight_decay={float(group['weight_decay']):g} on {plural(len(small), 'norm or bias parameter')}"
            yield found("NS308", place, f"{text}: {listed(small)}")


def _deep_transformer(subject: Subject) -> bool:
    return subject.attention_layers >= _DEEP


def _clipping(subject: Subject) -> Iterator[Finding]:
    policy = getattr(subject.guard, "policy", None)
    if policy is not None and (policy.clip_norm is not None or policy.clip_value is not None):
        return
    if subject.recurrent or _deep_transformer(subject):
        kind = "recurrent layers" if subject.recurrent else f"{subject.attention_layers} attention layers"
        yield found("NS306", "optimizer", f"{kind}, and no clip_norm that is known of")


def _warm_up(subject: Subject, kind: str) -> Iterator[Finding]:
    if kind not in _ADAMS or not (subject.attention_layers or subject.has_attention_op):
        return
    if any(_rises(group) for _, group in subject.groups()):
        return
    given = "no scheduler is given" if subject.scheduler is None else "the scheduler starts at its highest rate"
    yield found("NS307", "optimizer" if subject.scheduler is None else "scheduler", f"{kind}, and {given}")


def _rises(group: dict[str, Any]) -> bool:
    """A warm-up starts below its base rate, or (OneCycleLR) says where it goes to."""
    rate, base = float(group.get("lr", 0.0)), group.get("initial_lr")
    return "max_lr" in group or (base is not None and rate < 0.99 * float(base))
