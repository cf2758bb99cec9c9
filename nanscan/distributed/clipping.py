"""The norm of sharded gradients for `clip_grad_norm_`: one short exchange for each dimension of each mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nanscan.engine.result import EngineScan
from nanscan.engine.shards import is_dtensor

__all__ = ["MeshTotals", "as_torch_returns_it", "norms_joined", "total_over_meshes"]


_FAILED = -math.inf  # in place of a count of NaN: it stays what it is in every sum


class MeshTotals(NamedTuple):
    """What all ranks of the meshes know together."""

    norm: float  # of the finite elements
    nan_count: int
    inf_count: int


def total_over_meshes(
    params: Sequence[Any], scan: EngineScan | None, order: float, norm_of: Callable[[list[int]], float]
) -> MeshTotals:
    """The norm of any order over all elements, each counted once; every rank of the meshes has to take part.

    Args:
        params: the parameters, DTensors among them.
        scan: of this rank's shards; None: they can't be scanned, and the others must not wait for it.
        order: of the norm.
        norm_of: the norm of this rank's gradients at some positions.

    Raises:
        RuntimeError: a rank can't scan its gradients, or does not take part.
    """
    have = set() if scan is None else {row[0] for row in scan.rows()}

    def norms_of(positions: list[int]) -> list[float]:
        parts = [[at] for at in positions] if order == 0 else [positions]  # 0 counts tensors: each on its own
        return [norm_of([at for at in part if at in have and _counts_here(params[at])]) for part in parts]

    meshes: dict[Any, list[int]] = {}
    for position, param in enumerate(params):
        if is_dtensor(param) and param.device_mesh.get_coordinate() is not None:  # else the others' business
            meshes.setdefault(param.device_mesh, []).append(position)
    plain = norms_of([at for at, param in enumerate(params) if not is_dtensor(param)])
    norms, flags = [], [_FAILED, 0.0] if scan is None else [float(scan.nan_count), float(scan.inf_count)]
    for mesh, positions in meshes.items():
        sharded = norms_of(positions)
        for dim in range(mesh.ndim):
            rows = list(zip(*_gathered([*flags, *plain, *sharded], mesh, dim), strict=True))
            flags, plain = [sum(row) for row in rows[:2]], [max(row) for row in rows[2 : 2 + len(plain)]]
            sharded = [norms_joined(row, order) for row in rows[2 + len(plain) :]]
        norms += sharded
    if flags[0] == _FAILED:
        raise RuntimeError(
            "nanscan: a rank could not scan its gradients for clip_grad_norm_; its own error says why. Nothing was "
            "clipped on any rank"
        )
    norm = norms_joined([*norms, *plain], order)
    if norm == norms_joined([], order):  # no rank has an element
        norm = 0.0
    return MeshTotals(norm, int(flags[0]), int(flags[1]))


def norms_joined(norms: Sequence[float], order: float) -> float:
    """The norm of all elements from the norms of their parts; of no part, what changes no norm that it is joined to.

    >>> norms_joined([3.0, 4.0], 2.0), norms_joined([3.0, 4.0], math.inf), norms_joined([3.0, 4.0], 1.0)
    (5.0, 4.0, 7.0)
    """
    if order == 2.0:
        return math.hypot(*norms)
    if not norms:
        return math.inf if order < 0 else 0.0  # of a negative order the smallest element decides
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64, device="cpu"), order))


def as_torch_returns_it(norm: Tensor, params: Sequence[Any]) -> Tensor:
    """A DTensor on the mesh of the gradients where all lie on one, as torch's function returns; else a plain tensor."""
    having = [param for param in params if param.grad is not None]
    meshes: set[Any] = {param.device_mesh for param in having if is_dtensor(param)}
    if len(meshes) != 1 or not all(map(is_dtensor, having)):
        return norm
    from torch.distributed.tensor import DTensor, Replicate

    (mesh,) = meshes
    return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _counts_here(param: Any) -> bool:
    """Of ranks that hold the same elements the first of each replicated dimension counts them."""
    if not is_dtensor(param):
        return True
    at = param.device_mesh.get_coordinate()
    return all(hasattr(placement, "dim") or at[dim] == 0 for dim, placement in enumerate(param.placements))


def _gathered(numbers: Sequence[float], mesh: Any, dim: int) -> list[list[float]]:
    group = mesh.get_group(dim)
    kinds = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    device = "cpu" if "cpu" in kinds else mesh.device_type
    mine = torch.tensor(numbers, dtype=torch.float64, device=device)
    every = mine.new_empty((dist.get_world_size(group), len(numbers)))
    try:
        dist.all_gather(list(every.unbind()), mine, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"nanscan: the norm could not be shared along dimension {dim} of {mesh}: {error}. Every rank of the mesh "
            "must call clip_grad_norm_ with the same parameters"
        ) from error
    return list(every.tolist())
