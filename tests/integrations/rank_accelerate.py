"""What each rank does in the test of Accelerate with two processes."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch

import nanscan
from tests.guarded import bits


def a_guard_that_accelerate_meets_later(rank: int) -> Any:
    """Accelerate is imported after the guard was made, and nobody imports nanscan.integrations."""
    model = torch.nn.Linear(2, 1)
    guarded = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, process_group=False)
    known = "accelerate" in sys.modules
    from accelerate import Accelerator

    _environment(rank)
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(guarded)
    model(torch.full((1, 2), float("nan"))).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    skipped = (accelerator.optimizer_step_was_skipped, optimizer.skipped_steps)
    return {"known before": known, "kind": type(optimizer).__name__, "skipped": skipped}


def a_bad_loss_on_rank_1(rank: int) -> Any:
    """In step 1 all targets of rank 1 are ignored: its loss is NaN and no gradient is."""
    _environment(rank)
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


def _environment(rank: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
