"""AGC: each unit's gradient is held to a part of its weights' norm (Brock et al. 2021, arXiv:2102.06171)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from nanscan.engine.apply import writable_grads
from nanscan.engine.tensors import Entry, flat_params, is_float8
from nanscan.report import Label

__all__ = ["clip_units_", "excluded_positions"]


@torch.no_grad()
def clip_units_(
    groups: Sequence[dict[str, Any]],
    ratio: float,
    eps: float,
    excluded: frozenset[int] = frozenset(),
    scale: Tensor | None = None,
) -> Tensor | None:
    """Scale down in place every unit's gradient whose norm is above ``ratio * max(norm of the weights, eps)``.

    A unit is an index of the first dimension; a vector or scalar is one unit. Of a sparse gradient the rows it holds.

    Args:
        groups: `optimizer.param_groups`.
        ratio: see `nanscan.AdaptiveClip`.
        eps: likewise.
        excluded: positions of parameters that are left alone.
        scale: by which the gradients are too large, 0-dim; None: they are unscaled.

    Returns:
        The quotient of the norms of all gradients after and before, 0-dim on the device; None without gradients.

    Raises:
        NotImplementedError: for a parameter that is sharded, or a gradient that is sparse in several dimensions.
    """
    params = flat_params(groups)
    before, after = [], []
    for entry in writable_grads(groups):
        weights = _weights(params[entry.position], entry)
        norms = _unit_norms(entry.values)
        before.append(torch.linalg.vector_norm(norms))
        if is_float8(entry.values.dtype) or not excluded.isdisjoint((entry.position, *entry.also)):
            after.append(before[-1])
            continue
        limits = _unit_norms(weights).clamp_min(eps) * ratio
        if scale is not None:
            limits = limits * scale.to(limits)
        factors = torch.where(norms > limits, limits / norms, torch.ones_like(norms))
        entry.values.mul_(factors)
        after.append(torch.linalg.vector_norm(norms * factors))
    if not before:
        return None
    device = before[0].device
    whole, left = (torch.linalg.vector_norm(torch.stack([n.to(device) for n in each])) for each in (before, after))
    return torch.where(whole > 0, left / whole, torch.ones_like(whole))


def _weights(param: Tensor, entry: Entry) -> Tensor:
    """The weights whose norms count for the values of this gradient."""
    grad = entry.source
    if hasattr(param, "placements"):
        raise NotImplementedError(
            "AdaptiveClip('agc') needs whole parameters, this one is sharded (DTensor, FSDP): give clip_norm a number, "
            "or rule 'zclip'"
        )
    if grad.layout is torch.strided:
        return param.detach()
    if grad.layout is torch.sparse_coo and grad.sparse_dim() == 1:
        return param.detach().index_select(0, grad._indices()[0])
    raise NotImplementedError(
        "AdaptiveClip('agc') knows no units of a gradient that is sparse in several dimensions: exclude this parameter"
    )


def _unit_norms(values: Tensor) -> Tensor:
    """The norm of each index of the first dimension, shaped to be multiplied with; float64 where there is one."""
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    if values.is_complex():
        values = values.abs()
    elif is_float8(values.dtype):
        values = values.to(torch.float32)
    dims = tuple(range(1, values.dim())) if values.dim() > 1 else None
    norms: Tensor = torch.linalg.vector_norm(values, dim=dims, keepdim=dims is not None, dtype=wide)
    return norms


def excluded_positions(labels: Sequence[Label], exclude: Sequence[str]) -> frozenset[int]:
    """The positions of the parameters that one of the names, module names or patterns stands for.

    Raises:
        ValueError: if one stands for none.

    >>> labels = [Label((name,), (), "float32", "cpu") for name in ("body.weight", "head.weight", "head.bias")]
    >>> sorted(excluded_positions(labels, ["head"])), sorted(excluded_positions(labels, ["*.weight"]))
    ([1, 2], [0, 1])
    """
    found: set[int] = set()
    for wanted in exclude:
        hits = [i for i, label in enumerate(labels) if any(_stands_for(wanted, name) for name in label.names)]
        if not hits:
            names = [label.names[0] for label in labels]
            more = f", and {len(names) - 6} more" if len(names) > 6 else ""
            raise ValueError(
                f"exclude: no parameter is called {wanted!r}; they are called {', '.join(names[:6])}{more}. Names come "
                "from the model given to nanscan.wrap"
            )
        found.update(hits)
    return frozenset(found)


def _stands_for(wanted: str, name: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}.") or fnmatchcase(name, wanted)


def quotient_on_host(quotient: Tensor | None) -> float:
    """The number of `clip_units_`; waits for a device."""
    value = 1.0 if quotient is None else float(quotient)
    return value if math.isfinite(value) else 1.0
