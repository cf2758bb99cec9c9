"""Mixed precision: autocast, gradient scaler and the parameters' dtype must go together."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nanscan.preflight_checks.codes import found
from nanscan.preflight_checks.finding import Finding
from nanscan.preflight_checks.parameters import listed
from nanscan.preflight_checks.subject import Subject, plural

__all__ = ["check_precision"]


def check_precision(subject: Subject) -> Iterator[Finding]:
    """Judge autocast_dtype, scaler and parameters together."""
    if subject.autocast_dtype == torch.float16 and not subject.scaler_on:
        state = "scaler=None" if subject.scaler is None else "the scaler is disabled"
        yield found("NS601", "scaler", f"autocast_dtype is float16 and {state}")
    if subject.autocast_dtype == torch.bfloat16 and subject.scaler_on:
        yield found("NS602", "scaler", "autocast_dtype is bfloat16 and the scaler is enabled")
    half = [n for n, p in subject.named.items() if p.dtype == torch.float16 and p.requires_grad]
    if not half:
        return
    text = f"{plural(len(half), 'trainable float16 parameter')}: {listed(half)}"
    if subject.scaler_on:
        yield found("NS603", half[0], f"{text}; unscaling raises 'Attempting to unscale FP16 gradients'")
    else:
        yield found("NS604", half[0], f"{text}; updates below 1/2048 of a weight are rounded away")
