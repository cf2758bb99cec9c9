"""Lightning's Fabric with DDP in two processes that exist already; every function returns plain data."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import nanscan
from tests.distributed.edge_scenarios import data, net
from tests.distributed.scenarios import NAN, step_of, told


def launched(rank: int) -> Any:
    """A Fabric in an environment such as torchrun makes; the address is not used, as the process group exists."""
    from lightning.fabric import Fabric

    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    with patch.dict(os.environ, {**ours, "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}):
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
    return fabric


def trained(rank: int, order: str) -> Any:
    """A NaN in a gradient of rank 1 alone, after the reduction, at step 1; a NaN batch on rank 1 at step 3."""
    fabric, plain = launched(rank), net()
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1)
    if order == "before":
        optimizer = nanscan.wrap(optimizer, plain, process_group=True)
    model, optimizer = fabric.setup(plain, optimizer)
    if order == "after":
        optimizer = nanscan.wrap(optimizer, model)
    elif order == "after with group":
        optimizer = nanscan.wrap(optimizer, model, process_group=True)
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        fabric.backward(model(data(rank) * (NAN if step == 3 and rank == 1 else 1.0)).square().mean())
        if step == 1 and rank == 1 and order != "after":
            plain[2].weight.grad[4, 7] = NAN
        error = step_of(optimizer)
        seen.append((error, optimizer.step_was_skipped, told(optimizer.last_report)))
    return seen, [p.tolist() for p in plain.parameters()], fabric.world_size, dist.get_world_size()
