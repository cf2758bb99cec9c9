"""`clip_grad_norm_`: torch's, but it looks before it scales."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Sequence
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn

from nanscan import engine, paddle_objects
from nanscan.checks import sparse_places
from nanscan.distributed.gradients import local_grads, local_groups
from nanscan.engine.result import BadInput, EngineScan
from nanscan.engine.result import norm_of as norm_of_counts
from nanscan.engine.shards import is_dtensor
from nanscan.engine.tensors import resolve, unique
from nanscan.errors import NonFiniteError
from nanscan.names import label_of
from nanscan.policy import SHRINK, clip_factor, valid_limit
from nanscan.report import Report

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float | None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the norm of all gradients together, in place; a drop-in for `torch.nn.utils.clip_grad_norm_`.

    Of DTensors (FSDP2, tensor parallelism) it is the norm over all ranks, each logical element counted once: every rank
    of their meshes must call it. Meshes may differ, and plain tensors, which count as replicas, may stand beside them.

    Where an element is NaN or Inf it leaves the gradients alone (torch turns all of them into NaN or 0). Each tied
    gradient counts and is scaled once; the norm is right for finite elements of any magnitude; sparse gradients are
    taken as their coalesced values; an expanded gradient is replaced by a dense copy before it is scaled.

    Args:
        parameters: an iterable of tensors, or one; those without a gradient are skipped.
        max_norm: the largest norm allowed, > 0. None or inf: nothing is clipped, the norm is returned.
        norm_type: the order p of the norm; any number, inf for the largest magnitude. As in torch it is the norm of
            the gradients' norms: 0 counts the gradients with an element that is not 0, DTensors as wholes. p = 2 and
            inf cost one read of the gradients, others one more in torch operators.
        error_if_nonfinite: raise if an element is NaN or Inf.
        foreach: accepted for compatibility; there is one implementation.

    Returns:
        The norm before clipping, NaN or inf if an element is. A 0-dim tensor on the device of the first gradient;
        float64 if a gradient is float64 or complex128, else float32 (a float16 norm would often be inf). Without any
        gradient: `tensor(0.)`. Where all gradients are DTensors on one mesh it is a replicated DTensor, as torch
        returns it (`norm.item()` and `norm.full_tensor()` work); on several meshes, or beside plain tensors, where
        torch fails, it is a plain tensor.

    Raises:
        ValueError: if `max_norm` is 0, negative or NaN.
        TypeError: if `parameters` holds anything but tensors.
        NonFiniteError: `error_if_nonfinite` and an element is NaN or Inf; it is a RuntimeError, as torch's.

    The factor is `max_norm / (norm + 1e-6)` where that is below 1, as in `torch.nn.utils.clip_grad_norm_`.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([weight], max_norm=1.0), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    limit = valid_limit("max_norm", max_norm)
    order = float(norm_type)
    if isinstance(parameters, nn.Module):
        raise TypeError(f"parameters must be tensors, got the module {type(parameters).__name__}: give .parameters()")
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not params and isinstance(parameters, GeneratorType):
        warnings.warn("parameters is a generator with nothing (left) in it: no gradient is clipped", stacklevel=2)
    if paddle_objects.imported() and any(map(paddle_objects.is_tensor, params)):  # the compiled engine may read them
        raise TypeError("the parameters are Paddle's: use nanscan.integrations.paddle.clip_grad_norm_ for them")
    if any(is_dtensor(p) for p in params):
        return _clip_sharded(params, limit, order, error_if_nonfinite)
    groups = [{"params": params}]
    scan = _scan(groups)
    if scan.finite:
        norm = _norm(scan, params, order)
        factor = clip_factor(norm, limit)
        if factor == 0.0:  # the norm is beyond float64's range: its elements are brought within it first
            engine.scale_grads_(groups, SHRINK)
            factor = clip_factor(_norm(_scan(groups), params, order), limit)
        if factor != 1.0:
            engine.scale_grads_(groups, factor)
    else:
        norm = scan.norm
        if error_if_nonfinite:
            raise _error(scan, params)
    return _as_tensor(norm, [p.grad for p in params if p.grad is not None])


def _clip_sharded(params: list[Tensor], limit: float | None, order: float, error_if_nonfinite: bool) -> Tensor:
    """`clip_grad_norm_` for DTensors: all ranks find the same norm and clip by the same factor."""
    from nanscan.distributed.clipping import as_torch_returns_it, norms_joined, total_over_meshes

    groups = local_groups(params)
    try:
        scan = _scan(groups)
    except Exception:
        with contextlib.suppress(RuntimeError):  # what is raised here says more
            total_over_meshes(params, None, order, lambda positions: 0.0)
        raise
    grads = local_grads(params)
    rows = {row.position: row for row in scan.rows()}

    def norm_of(positions: list[int]) -> float:
        if order == 2.0:
            return math.hypot(*[rows[at].finite_norm for at in positions])
        values = [resolve(grads[at]) for at in positions] if scan.finite else []
        return _any_norm(values, order) if any(v.numel() for v in values) else norms_joined([], order)

    total = total_over_meshes(params, scan, order, norm_of)
    norm = norm_of_counts(total.norm, total.nan_count, total.inf_count)
    if total.nan_count or total.inf_count:
        if error_if_nonfinite:
            raise _error(scan, params)
    elif (factor := clip_factor(norm, limit)) != 1.0:
        engine.scale_grads_(groups, factor)
    return as_torch_returns_it(_as_tensor(norm, [grad for grad in grads if grad is not None]), params)


def _scan(groups: list[dict[str, Any]]) -> EngineScan:
    try:
        return engine.scan_grads(groups)
    except BadInput as error:
        raise error.kind(f"grad of parameters[{error.position}] {error.reason}") from None
    except AttributeError:
        for i, param in enumerate(groups[0]["params"]):
            if not isinstance(param, Tensor):
                raise TypeError(
                    f"parameters[{i}] is no tensor but a {type(param).__name__}: give model.parameters(), or a list of "
                    "tensors"
                ) from None
        raise


def _norm(scan: EngineScan, params: Sequence[Tensor], order: float) -> float:
    """The norm of finite gradients."""
    if order == 2.0:
        return scan.norm
    if order == math.inf and not any(p.is_complex() for p in params):
        return scan.inf_norm
    return _any_norm([entry.values for entry in unique([p.grad for p in params])], order)


@torch.no_grad()
def _any_norm(values: Sequence[Tensor], order: float) -> float:
    """The norm of any order over all elements of `values`, in float64."""
    wide = [v.to(torch.complex128).abs() if v.is_complex() else v.to(torch.float64) for v in values if v.numel()]
    if order > 0 and order != math.inf:  # powers of large or small elements leave float64's range
        largest = max((v.abs().max().item() for v in wide), default=0.0)
        if 0.0 < largest < math.inf:
            return largest * _of_wide([v / largest for v in wide], order)
    return _of_wide(wide, order)


def _of_wide(wide: Sequence[Tensor], order: float) -> float:
    norms = torch.tensor([torch.linalg.vector_norm(v, order).item() for v in wide], dtype=torch.float64, device="cpu")
    return torch.linalg.vector_norm(norms, order).item() if len(norms) else 0.0


def _as_tensor(norm: float, grads: Sequence[Tensor]) -> Tensor:
    if not grads:
        return torch.tensor(0.0, device=torch.get_default_device())
    wide = any(g.dtype in (torch.float64, torch.complex128) for g in grads)
    return torch.tensor(norm, dtype=torch.float64 if wide else torch.float32, device=grads[0].device)


def _error(scan: EngineScan, params: Sequence[Tensor]) -> NonFiniteError:
    grads = [p if p.grad is None else p.grad for p in params]
    labels = [label_of(g, (f"parameters[{i}]",), "grad") for i, g in enumerate(grads)]
    report = Report.from_scan(scan, labels, sparse_places(scan, [{"params": params}]))
    what = "another rank holds a NaN or Inf" if scan.finite else report.describe()
    return NonFiniteError(
        f"the gradients can't be clipped: {what}. They are left as they are; with "
        "error_if_nonfinite=False the non-finite norm is returned instead.",
        report,
    )
