"""Which ranks decide together: the group that was given, or the one that the parameters and the model imply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from nanscan.distributed.agreement import Agreement
from nanscan.distributed.exchange import device_of
from nanscan.engine.shards import is_dtensor

__all__ = ["agreement_over", "numbered", "reduced_by"]


class _Made:
    """What belongs to one `init_process_group`: a later one starts with nothing."""

    def __init__(self) -> None:
        self.world: Any = None
        self.groups: dict[tuple[int, ...], Any] = {}  # made here, by their ranks
        self.guards: dict[tuple[int, ...], int] = {}  # how many guarded optimizers a group has

    def now(self) -> _Made:
        if self.world is not dist.group.WORLD:
            self.__init__()  # type: ignore[misc]
            self.world = dist.group.WORLD
        return self


_made = _Made()


def agreement_over(
    process_group: Any,
    optimizer: Any,
    params: Sequence[Tensor],
    model: nn.Module | None,
) -> Agreement | None:
    """The agreement that `wrap(process_group=...)` asks for; None where this process decides alone.

    Args:
        process_group: as in `nanscan.wrap`; None: what the parameters, the optimizer and the model imply.
        optimizer: the inner one.
        params: all its parameters.
        model: as in `nanscan.wrap`.

    Raises:
        TypeError: it is no process group, True or "default".
        ValueError: this process is not in the group, the group lacks ranks that hold shards, or there is no default
            group yet.
        NotImplementedError: parameters are sharded by FSDP1.
    """
    if process_group is False:
        return None
    _refuse_flat_parameters(params, model)
    found = _implied(optimizer, params, model) if process_group is None else Agreement(_given(process_group))
    if found is not None:
        _refuse_missing_ranks(found, params)
    return found


def numbered(found: Agreement | None, before: Agreement | None) -> Agreement | None:
    """The agreement with the number of the guarded optimizer that it is for; `before`: what that had until now."""
    if found is None:
        return None
    guards, ranks = _made.now().guards, tuple(found.ranks)
    if before is not None and before.ranks == found.ranks and before.world is found.world:
        found.number = before.number
    else:
        found.number = guards.get(ranks, 0)
        guards[ranks] = found.number + 1
    return found


def _refuse_missing_ranks(agreement: Agreement, params: Sequence[Any]) -> None:
    held = {rank for param in params if is_dtensor(param) for rank in param.device_mesh.mesh.flatten().tolist()}
    if agreement.rank in held and not held <= set(agreement.ranks):
        raise ValueError(
            f"process_group has the ranks {agreement.ranks}, but parameters are sharded over the ranks {sorted(held)}: "
            "the norm would lack shards, and ranks would decide differently. Leave process_group out, which takes all "
            "ranks of the meshes, or give a group of all of them"
        )


def _given(given: Any) -> Any:
    if not dist.is_available():
        raise ValueError("process_group: this PyTorch was built without torch.distributed; leave it out")
    if given is True or (isinstance(given, str) and given == "default"):
        if not dist.is_initialized():
            raise ValueError(
                f"process_group={given!r} is the default group, and there is none yet: call "
                "torch.distributed.init_process_group() before nanscan.wrap()"
            )
        return dist.group.WORLD
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group: this process is not a member of the group; give one that it is in")
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup, True or 'default' (the default group), False (no "
            f"group) or None (the one that the parameters and the model imply), got {type(given).__name__}"
        )
    return given


def _refuse_flat_parameters(params: Sequence[Tensor], model: nn.Module | None) -> None:
    modules = () if model is None else model.modules()  # not `if model`: a compiled one may have no len()
    wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in modules)
    if wrapped or any(getattr(param, "_is_flat_param", False) for param in params):
        raise NotImplementedError(
            "the parameters are sharded by FullyShardedDataParallel (FSDP1), whose flat parameters do not say which "
            "rank holds which element: use torch.distributed.fsdp.fully_shard, which nanscan takes as it is; or give "
            "process_group=False, and each rank decides for itself"
        )


def _implied(optimizer: Any, params: Sequence[Any], model: nn.Module | None) -> Agreement | None:
    if not dist.is_available() or not dist.is_initialized():
        return None
    rank = dist.get_rank()
    sharded = [param for param in params if is_dtensor(param) and rank in param.device_mesh.mesh.flatten().tolist()]
    if sharded:
        return Agreement(_group_of_meshes(sharded))
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":  # its step() is a collective: all step, or none
        return Agreement(optimizer.process_group)
    replicas = [
        module
        for module in (model.modules() if model is not None else ())
        if isinstance(module, nn.parallel.DistributedDataParallel)
    ]
    if not replicas:
        return None
    groups = {tuple(dist.get_process_group_ranks(module.process_group)): module.process_group for module in replicas}
    reduced = {id(param) for module in replicas for param in reduced_by(module)}
    equal = all(id(param) in reduced or not param.requires_grad for param in params)
    return Agreement(_widest(groups), equal_gradients=equal and len(groups) == 1, reducers=replicas)


def _widest(groups: dict[tuple[int, ...], Any]) -> Any:
    """The group that has the ranks of all; the default one where they only overlap, as other ranks see other groups."""
    most = max(groups, key=len)
    return groups[most] if all(set(ranks) <= set(most) for ranks in groups) else dist.group.WORLD


def reduced_by(module: Any) -> list[Tensor]:
    """The parameters whose gradients DistributedDataParallel makes the same on every rank of its group."""
    ignored = set(module.parameters_to_ignore)
    return [param for name, param in module.module.named_parameters() if name not in ignored]


def _group_of_meshes(sharded: Sequence[Any]) -> Any:
    """A group of all ranks of the meshes that the parameters lie on, each taken with the mesh it was cut from."""
    meshes = {id(param.device_mesh): param.device_mesh for param in sharded}.values()
    ranks = tuple(sorted({rank for mesh in meshes for rank in _root(mesh).mesh.flatten().tolist()}))
    alone = all(sorted(_root(mesh).mesh.flatten().tolist()) != list(ranks) for mesh in meshes)
    if len(ranks) == dist.get_world_size() or alone:  # meshes that only overlap: other ranks see another union
        return dist.group.WORLD
    for mesh in meshes:
        if mesh.ndim == 1 and tuple(sorted(mesh.mesh.tolist())) == ranks:
            return mesh.get_group()
    groups = _made.now().groups
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks), _timeout_of_world(), use_local_synchronization=True)
    return groups[ranks]


def _timeout_of_world() -> Any:
    """The default group's, which a group made later does not take over by itself."""
    world: Any = dist.group.WORLD
    return getattr(getattr(world._get_backend(device_of(world)), "options", None), "_timeout", None)


def _root(mesh: Any) -> Any:
    root = getattr(mesh, "_get_root_mesh", None)
    return mesh if root is None else root()
