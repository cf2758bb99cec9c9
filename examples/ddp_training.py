"""Data parallel training whose processes skip a bad batch together.

Run: torchrun --nproc-per-node 2 examples/ddp_training.py   (alone: python examples/ddp_training.py)

Every fifth step the second process draws a row with a NaN. DistributedDataParallel spreads it to all gradients of all
processes, so all skip that step; because the loss is observed, the report also says on which rank it began.
"""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nanscan


def main() -> None:
    torch.set_num_threads(1)
    if "RANK" not in os.environ:  # started without torchrun: one process
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("gloo")  # "nccl" on GPUs
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = nanscan.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, clip_norm=1.0)
    target = torch.arange(8.0) / 8
    generator = torch.Generator().manual_seed(1 + rank)
    warnings.simplefilter("ignore")  # the report is printed below
    for step in range(100):
        x = torch.randn(32, 8, generator=generator)
        y = x @ target
        if rank == size - 1 and step % 5 == 4:
            x[0, 0] = float("nan")
        loss = (model(x).squeeze(1) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.observe(loss)  # a loss is each process's own: this costs one small collective a step
        optimizer.step()
        if not optimizer.step_was_skipped:
            last = loss.item()
        if rank == 0 and optimizer.step_was_skipped and optimizer.skipped_steps == 1:
            where = next(row for row in optimizer.last_report.bad if row.kind == "loss")
            print(f"step {step} skipped on all ranks; the loss was NaN on rank {where.rank}")
    every = [torch.zeros(()) for _ in range(size)]
    dist.all_gather(every, sum(p.detach().sum() for p in model.parameters()))
    if rank == 0:
        print(f"{size} processes, skipped {optimizer.skipped_steps} of 100; loss {last:.4f}")
        print(f"weights equal on all ranks: {all(torch.equal(one, every[0]) for one in every)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
