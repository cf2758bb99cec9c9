"""What each rank does in the test of Accelerate with two processes."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from tests.guarded import bits


def a_bad_loss_on_rank_1(rank: int) -> Any:
    """In step 1 all targets of rank 1 are ignored: its loss is NaN and no gradient is."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    from accelerate import Accelerator

    from nanscan.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler)
    skipped, rates = [], []
    for step in range(3):
        target = torch.full((4,), -100 if (rank, step) == (1, 1) else rank)
        accelerator.backward(torch.nn.functional.cross_entropy(model(torch.randn(4, 2)), target))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        rates.append(optimizer.param_groups[0]["lr"])
    return {
        "skipped": skipped,
        "rates": rates,
        "bad": [(row.name, row.rank) for row in optimizer.history[1].bad],
        "weights": bits([param.detach() for param in model.parameters()]),
        "name": accelerator.distributed_type.value,
    }
