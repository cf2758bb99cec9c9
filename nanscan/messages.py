"""What the guard says: every sentence of its warnings and errors. Describes; decides nothing."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from nanscan.errors import NonFiniteWarning
from nanscan.report import StepReport, TensorReport

if TYPE_CHECKING:
    from nanscan.origin.record import Origin

__all__ = [
    "bad_parameters",
    "bad_step",
    "diverged",
    "dropped_microbatch",
    "group_left_out",
    "lost_eps",
    "moves_by_itself",
    "no_gradients",
    "point_past",
    "spike",
    "warn",
]

_OUTCOME = {
    "skip": "skipped: {what}. Weights and optimizer state are unchanged, the gradients are cleared",
    "raise": "not taken: {what}. Weights and optimizer state are unchanged, the gradients are left for inspection",
    "zero": "taken with the bad elements set to 0: {what}",
    "warn": "taken although {what}",
}
_IMPORT = "<frozen importlib._bootstrap"  # the frames of an import statement
_INTERNAL = [  # folders whose frames are not the caller's
    str(Path(__file__).parent) + os.sep,
    str(Path(importlib.__file__).parent) + os.sep,
    _IMPORT,
]


def bad_step(report: StepReport, scale: float = 1.0, offender: str | None = None) -> str:
    """One line on a step with a NaN or Inf, or a spike: what was done, who, how many, where, and what else is known.

    Args:
        report: of that step.
        scale: the loss scale that was in force.
        offender: what `repeat_offender` has to say.
    """
    what = "the gradient scaler found an Inf or NaN that is not in these gradients"
    if report.bad or report.parameters:
        what = (
            report.describe()
            if report.bad
            else f"the update made NaN or Inf of finite gradients: {_listed(report.parameters)}"
        )
    elif report.spike is not None:
        what, scale = report.spike.describe(), 1.0
    parts = [f"nanscan: step {report.step} {_OUTCOME[report.action].format(what=what)}."]
    if report.origin is not None:
        parts.append(
            f"{report.origin.one_line()}." + (f" Hint: {report.origin.hint.rstrip('.')}." if report.origin.hint else "")
        )
    if report.scale_note:
        parts.append(f"{report.scale_note[0].upper()}{report.scale_note[1:]}.")
    elif scale != 1.0 and report.skipped:
        parts.append(f"The loss scale was {scale:g}; if that made it overflow, GradScaler.update() lowers it.")
    if report.dropped and len(report.dropped) == report.microbatches:
        parts.append(f"All {report.microbatches} micro-batches were dropped; this was the last one.")
    elif report.microbatch is not None:
        parts.append(f"It came with micro-batch {report.microbatch} of {report.microbatches} (counted from 0).")
    if offender:
        parts.append(f"{offender[0].upper()}{offender[1:]}.")
    if report.parameters and report.bad and report.skipped:
        parts.append(
            f"Bad before this step: {_listed(report.parameters)}. No skip mends that; go back to a checkpoint."
        )
    if report.buffers:
        parts.append(f"The forward pass has already spoiled what a skip can't restore: {_listed(report.buffers)}.")
    return " ".join(parts)


def diverged(report: StepReport, skips: int, offender: str | None) -> str:
    """Why the run is given up."""
    first = report.step - skips + 1
    return (
        f"{bad_step(report, offender=offender)} That makes {skips} skipped steps in a row (since step {first}), "
        "as many as max_consecutive_skips allows: the run does not recover by itself. Lower the learning rate, go back "
        "to a checkpoint, or look at what is named above."
    )


def bad_parameters(report: StepReport, suspects: Sequence[str]) -> str:
    """What a check of the parameters found after a step. `suspects`: settings of the optimizer that can do that."""
    cause = "finite gradients, non-finite update: " if report.finite else ""
    parts = [f"nanscan: after step {report.step}, {cause}{_listed(report.parameters)}"]
    return "; ".join([*parts, *suspects]) + ". The step can't be undone here; go back to a checkpoint."


def lost_eps(name: str, eps: float) -> str:
    """The warning at `wrap` about an eps that is 0, or that float16 can't hold."""
    if not eps:
        return (
            f"nanscan: eps=0 for '{name}': an update divides 0 by 0 where a gradient is 0, although every gradient is "
            "finite. Give the optimizer its usual eps; check_params_every=1 finds the damage."
        )
    return (
        f"nanscan: eps={eps:g} is 0 in float16, the dtype of '{name}': an update may divide by 0 although every "
        "gradient is finite. Give the optimizer eps=1e-4 or larger, float32 parameters, or fused=True, which computes "
        "in float32; check_params_every=1 finds the damage."
    )


def dropped_microbatch(found: str, origin: Origin | None, buffers: Sequence[TensorReport] = ()) -> str:
    """The warning about a micro-batch that is given up. `found`: what was wrong with it; `buffers`: bad ones now."""
    made = "" if origin is None else f" {origin.one_line()}."
    spoiled = f" Its forward pass has already spoiled what a drop can't restore: {_listed(buffers)}." if buffers else ""
    return (
        f"nanscan: dropped {found}.{made} The gradients of the other micro-batches are kept and are scaled up to the "
        f"whole window at the step.{spoiled}"
    )


def spike(report: StepReport) -> str:
    """The warning about a spike on a step that was taken."""
    assert report.spike is not None
    done = "" if report.clip_factor == 1.0 else f" with its gradients multiplied by {report.clip_factor:.3g}"
    return f"nanscan: step {report.step} taken{done} although {report.spike.describe()}."


def scaler_needed() -> str:
    """The error where torch's scaler would fail in `update()`, because all gradients are gone."""
    return (
        "nanscan: every micro-batch of this step was dropped, so the GradScaler has no gradient to look at and its "
        "update() would fail. Let it hear of the drops: optimizer.check_microbatch(loss, drop=True, scaler=scaler), or "
        "use nanscan.GradScaler"
    )


def no_gradients(step: int) -> str:
    """The hint when no parameter has a gradient."""
    return (
        f"nanscan: no gradients at step {step}: none of the optimizer's parameters has a .grad, so the step changes "
        "nothing. Call backward() first, and check requires_grad and that the loss depends on these parameters. "
        "(This is said once.)"
    )


def moves_by_itself(name: str) -> str:
    """On a method of the inner optimizer that changes weights and is no `step`."""
    return (
        f"nanscan: {name}() is the inner optimizer's own and changes weights without a look at the gradients; only "
        "step() is guarded. If the optimizer takes a closure (SAM does), write optimizer.step(closure) instead"
    )


def group_left_out() -> str:
    """The warning when a guard that has a process group is copied or pickled."""
    return (
        "nanscan: the process group is left out of this copy: on it each rank decides for itself. Give it again with "
        "nanscan.wrap(copy, process_group=...)"
    )


def warn(text: str, category: type[Warning] = NonFiniteWarning) -> None:
    """`warnings.warn`, pointing at the caller's line outside of nanscan and its framework."""
    level, frame = 2, sys._getframe(1)
    if "torch" in sys.modules and not any("/torch/" in folder for folder in _INTERNAL):
        point_past(sys.modules["torch"])
    while frame.f_back is not None and frame.f_code.co_filename.startswith(tuple(_INTERNAL)):
        level += not frame.f_code.co_filename.startswith(_IMPORT)  # which `warnings` does not count
        frame = frame.f_back
    warnings.warn(text, category, stacklevel=level)


def point_past(*packages: ModuleType) -> None:
    """Let warnings point past the frames of these packages too: whose trainer runs the loop has no line to mend."""
    folders = [str(Path(str(package.__file__)).parent) + os.sep for package in packages]
    _INTERNAL.extend(folder for folder in folders if folder not in _INTERNAL)


def _listed(rows: Sequence[TensorReport], limit: int = 4) -> str:
    more = f"; and {len(rows) - limit} more" if len(rows) > limit else ""
    return "; ".join(row.describe() for row in rows[:limit]) + more
