"""One real forward and backward pass, as the training loop would run it, of which nothing remains."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nanscan.origin.frames import LIBRARY, USER, owner_of, source_of
from nanscan.preflight_checks.codes import found
from nanscan.preflight_checks.finding import Finding
from nanscan.preflight_checks.indices import OutOfRange
from nanscan.preflight_checks.keeping import Kept
from nanscan.preflight_checks.subject import Subject
from nanscan.preflight_checks.watching import Watch
from nanscan.reruns import rerun

__all__ = ["Pass", "run_pass"]


@dataclass
class Pass:
    """What a pass told.

    Attributes:
        grads: the gradient of each trainable parameter by name, None where it has none; {} without a backward pass.
        order: layers in the order of their calls.
        completed: it raised nothing, so every row that it looked up is there.
        classes_seen: and so is every label's class.
        trained: (cross-entropy, classes) where the model seems to be trained already.
        findings: of the ops, the loss, and exceptions.
    """

    grads: dict[str, Tensor | None] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    completed: bool = False
    classes_seen: bool = False
    trained: tuple[float, int] | None = None
    findings: list[Finding] = field(default_factory=list)


def run_pass(subject: Subject) -> Pass:
    """Run forward and, if there is a loss, backward; put everything back, whatever the user's code raises."""
    done = Pass()
    kept = _keep(subject)
    watch = Watch(subject.model, kept)
    watch.start()
    try:
        with eager(), rerun():
            _forward_backward(subject, watch, done)
        done.completed, done.classes_seen = True, watch.losses.classes_seen
    except OutOfRange as error:
        done.findings.append(error.finding)
    except Exception as error:
        done.grads = {}
        done.findings.append(_raised(error, subject))
    finally:
        watch.stop()
        kept.restore()
    with torch.no_grad():
        done.findings += watch.findings()
    done.order, done.trained = watch.activations.order, watch.losses.trained
    subject.has_attention_op = watch.attention
    bad = next((f for f in done.findings if f.code in ("NS404", "NS405")), None)
    if bad is not None:
        done.findings[done.findings.index(bad)] = _with_origin(bad, subject)
    return done


def _keep(subject: Subject) -> Kept:
    return Kept([m for m in (subject.called, subject.loss_fn, subject.forward) if isinstance(m, nn.Module)])


def _forward_backward(subject: Subject, watch: Watch, done: Pass) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        with _autocast(subject):
            loss = loss_of(subject)
        watch.judging = False
        if loss is None or not _usable(loss, done.findings):
            return
        loss.backward()
    done.grads = {name: param.grad for name, param in subject.ready.items() if param.requires_grad}
    if bool(loss.detach().isfinite().all()) and _bad_gradients(done.grads):
        names = _bad_gradients(done.grads)
        more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
        done.findings.append(found("NS405", names[0], f"its gradient{more} is NaN or Inf; the loss is finite"))


def loss_of(subject: Subject) -> Any:
    """The loss of the batch; None where nothing gives one."""
    if subject.forward is not None:
        return subject.forward(subject.called, subject.batch)
    if subject.loss_fn is not None:
        inputs, targets = subject.batch
        return subject.loss_fn(subject.called(inputs), targets)
    if isinstance(subject.batch, Mapping):
        out = subject.called(**subject.batch)
        return out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    pair = isinstance(subject.batch, (tuple, list)) and len(subject.batch) == 2
    subject.called(subject.batch[0] if pair else subject.batch)
    return None


def _usable(loss: Any, findings: list[Finding]) -> bool:
    if not isinstance(loss, Tensor):
        findings.append(found("NS402", "loss", f"is a {type(loss).__name__}, not a tensor"))
    elif loss.numel() != 1:
        findings.append(found("NS402", "loss", f"has shape {list(loss.shape)}; backward() needs one number"))
    elif not loss.requires_grad:
        findings.append(found("NS403", "loss", "does not require a gradient: nothing would be learnt"))
    elif not bool(loss.detach().isfinite()):
        findings.append(found("NS404", "loss", f"is {float(loss.detach())} on the given batch"))
        return True
    return isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad


def _bad_gradients(grads: Mapping[str, Tensor | None]) -> list[str]:
    from nanscan.origin.dispatch import scan_bad, unseen

    with unseen():
        present = {name: grad for name, grad in grads.items() if grad is not None}
        bad = scan_bad(list(present.values()))
    return [name for name, grad in present.items() if id(grad) in bad]


def _autocast(subject: Subject) -> contextlib.AbstractContextManager[Any]:
    if subject.autocast_dtype is None or subject.autocast_dtype == torch.float32:
        return contextlib.nullcontext()
    device = next((p.device.type for p in subject.ready.values()), "cpu")
    return torch.autocast(device, subject.autocast_dtype)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Compiled functions run as the eager ones that they were made from."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _raised(error: Exception, subject: Subject) -> Finding:
    frames = [(frame.f_code, frame.f_lasti) for frame, _ in traceback.walk_tb(error.__traceback__)]
    for owner in (USER, LIBRARY):
        theirs = [place for place in frames if owner_of(place[0]) == owner]
        if theirs:
            source = source_of(*theirs[-1])
            place = f", at {source.file}:{source.line}: {source.code}"
            break
    else:
        place = ""
    where = "forward" if subject.forward is not None else type(subject.model).__name__
    return found("NS401", where, f"{type(error).__name__}: {error}{place}")


def _with_origin(finding: Finding, subject: Subject) -> Finding:
    """The finding with the op that made the NaN, if a traced second run finds it."""
    from nanscan.origin.replay import find_origin

    def step() -> None:
        with torch.enable_grad(), _autocast(subject):
            loss = loss_of(subject)
        loss.backward()

    kept = _keep(subject)
    try:
        with eager():
            origin = find_origin(step, subject.model)
    except Exception:  # the finding stands without it
        return finding
    finally:
        kept.restore()
    if origin is None:
        return finding
    fix = finding.fix if origin.hint is None else origin.hint
    where = finding.where if origin.module is None else origin.module or "model"
    return found(finding.code, where, f"{finding.where}: {finding.message}. {origin.one_line()}", fix=fix)
