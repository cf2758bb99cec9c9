"""One small float64 model, laid out over the ranks in every way that the guard has to understand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

BATCH, LENGTH, WIDTH = 8, 4, 6


class Net(nn.Module):
    """Shapes that no world size divides: 5 rows, a bias of 3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.down(torch.tanh(self.up(self.norm(x))))))


def fresh() -> Net:
    torch.manual_seed(7)
    return Net().double()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return 3.0 * torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


@dataclass
class Layout:
    """How this rank takes part.

    Attributes:
        model: what is called.
        inner: the optimizer to be wrapped.
        share: (index, number of shares) of the batch that this rank sees.
        options: for `wrap`.
        after: follows each step.
        reduce: brings gradients that no wrapper reduces to their mean over the ranks.
        no_sync: what the micro-batches of an accumulation but the last run under.
        wrapped: what is given to `wrap` as the model.
    """

    model: nn.Module
    inner: torch.optim.Optimizer
    share: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)
    reduce: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    wrapped: nn.Module | None = None


def optimizer(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, **options)


def mean_over(params: Any, group: Any = None) -> None:
    for param in params:
        if param.grad is not None:
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            dist.all_reduce(grad, group=group)
            grad /= dist.get_world_size(group)


def ddp(rank: int, size: int) -> Layout:
    model = DistributedDataParallel(fresh())
    return Layout(model, optimizer(model.parameters()), (rank, size), no_sync=model.no_sync)


def ddp_with_group(rank: int, size: int) -> Layout:
    layout = ddp(rank, size)
    layout.options = {"process_group": True}
    return layout


def zero1(rank: int, size: int) -> Layout:
    model = DistributedDataParallel(fresh())
    inner = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    return Layout(model, inner, (rank, size))


def fsdp(rank: int, size: int) -> Layout:
    model = fresh()
    for part in (model.up, model.down):
        fully_shard(part)
    fully_shard(model)
    return Layout(model, optimizer(model.parameters()), (rank, size))


def frozen(rank: int, size: int) -> Layout:
    model = fresh()
    model.up.requires_grad_(False)
    fully_shard(model)
    return Layout(model, optimizer(model.parameters()), (rank, size))


def mixed(rank: int, size: int) -> Layout:
    """DTensors and plain tensors in one optimizer."""
    model = fresh()
    fully_shard(model.up)
    fully_shard(model.head)
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    return Layout(model, optimizer(model.parameters(), foreach=False), (rank, size), reduce=lambda: mean_over(plain))


def tensor_parallel(rank: int, size: int) -> Layout:
    model = fresh()
    mesh = init_device_mesh("cpu", (size,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return Layout(model, optimizer(model.parameters(), foreach=False), (0, 1))


def sequence_parallel(rank: int, size: int) -> Layout:
    """The gradient of the layer norm is left as a partial sum."""
    model = fresh()
    mesh = init_device_mesh("cpu", (size,))
    from torch.distributed.tensor import Replicate, Shard

    plan = {
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    }
    parallelize_module(model, mesh, plan)
    parallelize_module(model.up, mesh, ColwiseParallel())
    parallelize_module(model.down, mesh, RowwiseParallel())
    return Layout(model, optimizer(model.parameters(), foreach=False), (0, 1))


def hybrid(rank: int, size: int) -> Layout:
    """Replicas of shards: a mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    model = fresh()
    fully_shard(model, mesh=mesh)
    return Layout(model, optimizer(model.parameters()), (rank, size))


def two_dimensions(rank: int, size: int) -> Layout:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    model = fresh()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return Layout(model, optimizer(model.parameters(), foreach=False), (mesh.get_coordinate()[0], 2))


def part_mesh(rank: int, size: int) -> Layout:
    """Tensor parallel over a part of the mesh, plain replicas along the other dimension, plain tensors beside them."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    model = fresh()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    group = mesh.get_group("dp")
    inner = optimizer(model.parameters(), foreach=False)
    return Layout(model, inner, (mesh.get_coordinate()[0], 2), reduce=lambda: mean_over(model.parameters(), group))


def pipeline(rank: int, size: int) -> Layout:
    """Each rank trains other parameters; with four ranks, two replicas of two stages."""
    model = fresh()
    stages = [[model.norm, model.up], [model.down, model.head]]
    stage = stages[rank % 2]
    for part in stages[1 - rank % 2]:
        part.requires_grad_(False)
    own = [p for part in stage for p in part.parameters()]

    def exchange() -> None:  # the stages see each other's weights, as if activations had gone through both
        for source, parts in enumerate(stages):
            for param in (p for part in parts for p in part.parameters()):
                dist.broadcast(param.detach(), source)

    return Layout(model, optimizer(own), (0, 1), options={"process_group": True}, after=exchange)


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    f.__name__: f
    for f in (
        ddp,
        ddp_with_group,
        zero1,
        fsdp,
        frozen,
        mixed,
        tensor_parallel,
        sequence_parallel,
        hybrid,
        two_dimensions,
        part_mesh,
        pipeline,
    )
}
FOUR_ONLY = ("hybrid", "two_dimensions", "part_mesh")
