"""Clipping the gradients of Paddle parameters; `clip_grad_norm_` is Paddle's, but it looks before it scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import paddle

from nanscan.engine.result import BadInput
from nanscan.errors import NonFiniteError
from nanscan.integrations.paddle.engine import scale_, scan_tensors
from nanscan.integrations.paddle.gradients import is_grouped, writable
from nanscan.integrations.paddle.tensors import dtype_name, label_of, resolve_at, sparse_places
from nanscan.policy import clip_factor, valid_limit
from nanscan.report import Report

__all__ = ["clip_grad_norm_", "global_limit", "without_global_clip"]


def clip_grad_norm_(
    parameters: Any, max_norm: float | None, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Any:
    """Clip the norm of all gradients together, in place; a drop-in for `paddle.nn.utils.clip_grad_norm_`.

    Where an element is NaN or Inf it leaves the gradients alone (Paddle turns all of them into NaN or 0). The norm is
    right for finite elements of any magnitude, also in float16; each tied gradient counts and is scaled once; sparse
    rows are taken with equal rows summed.

    Args:
        parameters: an iterable of tensors, or one; those without a gradient are skipped.
        max_norm: the largest norm allowed, > 0. None or inf: nothing is clipped, the norm is returned.
        norm_type: the order p of the norm, inf for the largest magnitude; 0 counts the gradients with an element that
            is not 0, as in Paddle. p = 2 and inf cost one read of the gradients.
        error_if_nonfinite: raise if an element is NaN or Inf.

    Returns:
        The norm before clipping, NaN or inf if an element is: a 0-dim tensor, float64 if a gradient is float64 or
        complex128, else float32.

    Raises:
        ValueError: if `max_norm` is 0, negative or NaN.
        TypeError: if `parameters` are no tensors.
        NonFiniteError: `error_if_nonfinite` and an element is NaN or Inf; it is a RuntimeError, as Paddle's.

    The factor is `max_norm / (norm + 1e-6)` where that is below 1, as in `paddle.nn.utils.clip_grad_norm_`.

    >>> weight = paddle.create_parameter([2], "float32")
    >>> weight.grad = paddle.to_tensor([3.0, 4.0])
    >>> float(clip_grad_norm_([weight], max_norm=1.0)), weight.grad.numpy().round(4).tolist()
    (5.0, [0.6000000238418579, 0.800000011920929])
    """
    limit = valid_limit("max_norm", max_norm)
    params = _tensors(parameters)
    grads = [p._grad_ivar() for p in params]
    try:
        scan = scan_tensors(grads)
    except BadInput as error:
        raise error.kind(f"grad of parameters[{error.position}] {error.reason}") from None
    norm = scan.norm
    if scan.finite:
        if norm_type != 2.0:
            norm = _any_norm(grads, float(norm_type))
        factor = clip_factor(norm, limit)
        if factor != 1.0:
            scale_(writable(params, grads), factor)
    elif error_if_nonfinite:
        labels = [
            label_of(p if g is None else g, (f"parameters[{i}]",), "grad")
            for i, (p, g) in enumerate(zip(params, grads, strict=True))
        ]
        report = Report.from_scan(scan, labels, sparse_places(scan, grads))
        raise NonFiniteError(
            f"the gradients can't be clipped: {report.describe()}. They are left as they are; with "
            "error_if_nonfinite=False the non-finite norm is returned instead.",
            report,
        )
    wide = any(g is not None and dtype_name(g.dtype) in ("float64", "complex128") for g in grads)
    return paddle.to_tensor(norm, dtype="float64" if wide else "float32")


def _tensors(parameters: Any) -> list[Any]:
    if isinstance(parameters, paddle.Tensor):
        return [parameters]
    if isinstance(parameters, paddle.nn.Layer) or not isinstance(parameters, Iterable):
        raise TypeError(
            f"parameters must be an iterable of paddle.Tensor, got {type(parameters).__name__}: of a layer, give "
            "layer.parameters()"
        )
    params = list(parameters)
    for i, param in enumerate(params):
        if not isinstance(param, paddle.Tensor):
            raise TypeError(f"parameters[{i}] must be a paddle.Tensor, got {type(param).__name__}")
    return params


@paddle.no_grad()
def _any_norm(grads: Sequence[Any], order: float) -> float:
    """The norm of any order over all elements, in float64. Tied gradients once."""
    parts = {(g.data_ptr() if g.is_dense() else id(g)): resolve_at(0, g) for g in grads if g is not None and g.size}
    wide = [(v.astype("complex128") if v.is_complex() else v.astype("float64")).abs().flatten() for v in parts.values()]
    if not wide:
        return 0.0
    if order == math.inf:
        return max(float(v.max()) for v in wide)
    if order == 0:
        return float(sum(bool((v != 0).any()) for v in wide))
    norms = paddle.stack([paddle.linalg.norm(v, order) for v in wide])
    return float(paddle.linalg.norm(norms, order))


def _holder(optimizer: Any) -> dict[str, Any] | None:
    """The dict whose "grad_clip" a step goes by, where it is the only one; None: several groups, each by its own."""
    if not is_grouped(optimizer):
        return None
    return optimizer._param_groups[0] if len(optimizer._param_groups) == 1 else {}


def global_limit(optimizer: Any) -> float | None:
    """The limit of a `ClipGradByGlobalNorm` that the guard applies in Paddle's place; None: there is none.

    Several groups of parameters are clipped by Paddle, each by its own norm, and so is what several processes share.
    """
    group = _holder(optimizer)
    clip = optimizer._grad_clip if group is None else group.get("grad_clip")
    if type(clip) is not paddle.nn.ClipGradByGlobalNorm or getattr(clip, "should_comm_on_shard_dim", False):
        return None
    return float(clip.clip_norm)


@contextmanager
def without_global_clip(optimizer: Any) -> Iterator[None]:
    """Within, the optimizer does not clip by what `global_limit` found: that was done before."""
    if global_limit(optimizer) is None:
        yield
        return
    group = _holder(optimizer)
    clip = optimizer._grad_clip if group is None else group["grad_clip"]
    try:
        _set_clip(optimizer, group, None)
        yield
    finally:
        _set_clip(optimizer, group, clip)


def _set_clip(optimizer: Any, group: dict[str, Any] | None, clip: Any) -> None:
    if group is None:
        optimizer._grad_clip = clip
    else:
        group["grad_clip"] = clip
