"""`nanscan.preflight`: what is wrong with a run, before it starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from nanscan.log import logs_of
from nanscan.preflight_checks.batch import check_given_batch
from nanscan.preflight_checks.checkpointing import check_checkpointing
from nanscan.preflight_checks.codes import CODES
from nanscan.preflight_checks.finding import SEVERITIES, Finding, Findings
from nanscan.preflight_checks.first_pass import Pass, run_pass
from nanscan.preflight_checks.first_update import check_first_update
from nanscan.preflight_checks.gradients import check_gradients
from nanscan.preflight_checks.parameters import check_parameters
from nanscan.preflight_checks.precision import check_precision
from nanscan.preflight_checks.settings import check_settings
from nanscan.preflight_checks.subject import Subject, without_wrappers
from nanscan.preflight_checks.weights import check_weights

__all__ = ["preflight"]

_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32)
_LATE = frozenset({"NS404", "NS405"})
_INDICES = frozenset({"NS503", "NS504"})


def preflight(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    batch: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    autocast_dtype: torch.dtype | None = None,
    silence: Collection[str] = (),
) -> Findings:
    """Look for what is wrong with a run before it starts; the more is given, the more is looked at.

    With a batch, one real forward and backward pass is run. Nothing of it remains: parameters, buffers, `.grad`,
    optimizer state, training modes and the global random generators are bit for bit as they were, also where the
    model raises (which is a finding). Hooks of the user's own run as in training, and what they do outside of the
    model (logging, say) is theirs. The first update is made on copies of the parameters and the optimizer.

    Args:
        model: any module, with its initial weights, in training mode.
        optimizer: of PyTorch, or what `nanscan.wrap` returned (then clipping is known).
        batch: `(inputs, targets)`, on the model's device; the loss is `loss_fn(model(inputs), targets)`.
            With `forward`: anything. Without either: a mapping is called as `model(**batch)`, whose `.loss` is used if
            it has one.
        loss_fn: a function of outputs and targets that returns a scalar.
        forward: a function `forward(model, batch)` that returns the loss; instead of `loss_fn`.
        scheduler: of the learning rate, made for this optimizer: whether it warms up, whether it can be saved.
        scaler: a `torch.amp.GradScaler`, if the run has one.
        autocast_dtype: `torch.float16` or `torch.bfloat16` if the run uses autocast; the pass is run under it.
        silence: codes to leave out, such as `{"NS308"}`.

    Returns:
        A list of `Finding`, the most severe first; `print` shows it as a report. `docs/preflight.md` has all codes.
        They are noted in the log of a guarded optimizer, for `nanscan report`.

    Raises:
        TypeError: the model is no module, or something can't be called.
        ValueError: an unknown code or dtype, or a batch that is no pair although `loss_fn` needs one.

    >>> import torch, nanscan
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> optimizer = torch.optim.Adam(model[0].parameters(), lr=0.3)
    >>> batch = torch.randn(6, 4), torch.randint(0, 3, (6,))
    >>> for finding in nanscan.preflight(model, optimizer, batch, torch.nn.functional.cross_entropy):
    ...     print(finding.code, finding.severity, finding.where)
    NS201 warning 2.weight
    NS302 warning optimizer.param_groups[0]
    NS303 warning 0.weight
    """
    silenced = _codes(silence)
    subject = _subject(model, optimizer, batch, loss_fn, forward, scheduler, scaler, autocast_dtype)
    findings = [f for f in dict.fromkeys(_all(subject)) if f.code not in silenced]
    found = Findings(sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), f.code)))
    for log in logs_of(subject.guard):
        log.note("preflight", {"findings": [finding.to_dict() for finding in found]})
    return found


def _all(subject: Subject) -> Iterator[Finding]:
    done = Pass()
    if subject.batch is not None:
        batch = list(check_given_batch(subject))
        if len(subject.ready) == len(subject.named):  # a lazy model would be changed by its first forward pass
            done = run_pass(subject)
            done.findings = [f for f in done.findings if not _same_said(f, {told.code for told in batch})]
        yield from [finding for finding in batch if not _disproved(finding, done)]
    yield from done.findings
    with torch.no_grad():
        yield from check_weights(subject, done.grads)
        yield from check_parameters(subject)
        yield from check_settings(subject, done.trained)
        yield from check_precision(subject)
        yield from check_gradients(subject, done)
        if not _LATE & {finding.code for finding in done.findings}:
            yield from check_first_update(subject, done.grads)
        yield from check_checkpointing(subject)


def _same_said(finding: Finding, told: Collection[str]) -> bool:
    """An op's index is out of range, which was found in the batch already: a long sequence, say, leaves the table."""
    return (finding.code == "NS502" and "NS502" in told) or (finding.code == "NS503" and not _INDICES.isdisjoint(told))


def _disproved(finding: Finding, done: Pass) -> bool:
    """The model took it: a batch of one token more than there are positions, say, of which `forward` uses the first."""
    if finding.severity != "error" or not done.completed:
        return False
    return finding.code in _INDICES or (finding.code == "NS502" and done.classes_seen)


def _subject(
    model: nn.Module,
    optimizer: Any,
    batch: Any,
    loss_fn: Any,
    forward: Any,
    scheduler: Any,
    scaler: Any,
    autocast_dtype: torch.dtype | None,
) -> Subject:
    from nanscan.guard import GuardedOptimizer

    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}")
    _check_functions(loss_fn, forward, batch)
    if autocast_dtype not in _DTYPES:
        raise ValueError(f"autocast_dtype must be torch.float16, torch.bfloat16 or None, got {autocast_dtype!r}")
    called, inner = without_wrappers(model)
    guard = optimizer if isinstance(optimizer, GuardedOptimizer) else None
    plain = optimizer if guard is None else guard.optimizer
    return Subject(inner, called, plain, guard, batch, loss_fn, forward, scheduler, scaler, autocast_dtype)


def _check_functions(loss_fn: Any, forward: Any, batch: Any) -> None:
    for name, function in (("loss_fn", loss_fn), ("forward", forward)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function or None, got {type(function).__name__}")
    if loss_fn is not None and forward is not None:
        raise ValueError("give loss_fn or forward, not both: forward(model, batch) returns the loss itself")
    if loss_fn is not None and batch is not None and not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        kind = f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
        raise ValueError(f"with loss_fn the batch must be (inputs, targets), got a {kind}; else give forward=")


def _codes(silence: Collection[str]) -> frozenset[str]:
    codes = frozenset({silence} if isinstance(silence, str) else silence)
    unknown = sorted(code for code in codes if code not in CODES)
    if unknown:
        raise ValueError(f"silence: there is no code {', '.join(map(repr, unknown))}; docs/preflight.md lists them")
    return codes
