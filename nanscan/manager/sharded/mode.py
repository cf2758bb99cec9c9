"""Who saves and restores: this process alone, one rank for replicas, or every rank its shards."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from nanscan.distributed.groups import agreement_over, reduced_by
from nanscan.engine.shards import is_dtensor
from nanscan.guard import GuardedOptimizer
from nanscan.snapshot import nested_optimizers

__all__ = ["Mode", "mode_of"]


class Mode(NamedTuple):
    """How a run is saved.

    Attributes:
        group: whose ranks take part.
        replicated: every rank holds the same: the first one writes a plain file. Else each writes its shards.
    """

    group: Any
    replicated: bool


def mode_of(given: Any, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Mode | None:
    """How this run is saved; None: by this process alone, into a plain file.

    Args:
        given: `process_group` of the manager.
        model, optimizer: of the run.

    Raises:
        NotImplementedError: FSDP1, or an optimizer whose state is spread over the ranks in a way of its own.
    """
    if given is False or not dist.is_available() or not dist.is_initialized():
        return None
    params = _params(model, optimizer)
    sharded = any(map(is_dtensor, params))
    flat = any(getattr(param, "_is_flat_param", False) for param in params)  # FSDP1: refused below
    if given is None and not sharded and not flat:
        return None
    inner = optimizer.optimizer if isinstance(optimizer, GuardedOptimizer) else optimizer
    nested = [] if inner is None else nested_optimizers(inner)
    if any(type(part).__name__ == "ZeroRedundancyOptimizer" for part in nested):
        raise NotImplementedError(
            "CheckpointManager does not save a ZeroRedundancyOptimizer together (its state is spread over the ranks, "
            "outside of DTensors): call optimizer.consolidate_state_dict() on all ranks and save on rank 0, with a "
            "manager without process_group, or use fully_shard"
        )
    agreement = agreement_over(given, inner, params, model)
    assert agreement is not None
    return Mode(agreement.group, not sharded and _is_replicated(model, params, agreement.ranks))


def _params(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> list[Any]:
    groups = [] if optimizer is None else optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    return [*params, *(model.parameters() if model is not None else ())]


def _is_replicated(model: nn.Module | None, params: list[Any], ranks: list[int]) -> bool:
    """True if DistributedDataParallel keeps every parameter equal on these ranks."""
    if model is None:
        return False
    ddp = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    wide = [m for m in ddp if set(ranks) <= set(dist.get_process_group_ranks(m.process_group))]
    kept = {id(p) for m in wide for p in reduced_by(m)}
    return bool(wide) and all(id(p) in kept for p in params)
