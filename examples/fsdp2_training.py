"""Sharded training (fully_shard): one norm, one clip factor, one decision over all shards; checkpoints and resume.

Run: torchrun --nproc-per-node 2 examples/fsdp2_training.py [FOLDER]   (alone: python examples/fsdp2_training.py)

Each process holds a part of every weight. At step 10 one element of one shard becomes NaN, on the process holding it:
all processes skip the step, and all name the rank, the parameter and the index in the whole weight. Every 25 steps all
save together, each its shards; started again with the same FOLDER, on any number of processes, the run goes on from the
newest complete checkpoint. Without FOLDER they are in a temporary one.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import nanscan


def main() -> None:
    torch.set_num_threads(1)
    if "RANK" not in os.environ:  # started without torchrun: one process
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("gloo")  # "nccl" on GPUs
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = nanscan.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, clip_norm=1.0)
    manager = nanscan.CheckpointManager(folder_of_all(rank), every_steps=25, keep=2)
    restored = manager.restore(model=model, optimizer=optimizer)
    first = 0 if restored is None else restored.step
    target = torch.arange(8.0) / 8
    generator = torch.Generator()
    warnings.simplefilter("ignore")  # the report is printed below
    loss = torch.zeros(())
    for step in range(first, 100):
        generator.manual_seed(1000 * step + rank)  # the batch of a step is the same in a run that is resumed
        x = torch.randn(32, 8, generator=generator)
        loss = (model(x).squeeze(1) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 10 and rank == size - 1:  # the last row of the weight is on the last rank
            model[0].weight.grad.to_local()[-1, 3] = float("nan")
        optimizer.step()
        if step == 0 and rank == 0:
            print(f"norm over {optimizer.last_report.numel} elements: {optimizer.last_report.norm:.4f}")
        if optimizer.step_was_skipped:
            print(f"rank {rank}: step {step} skipped, {optimizer.last_report.describe()}", flush=True)
        manager.save(step + 1, model=model, optimizer=optimizer)  # a folder, when it is due, written in the background
    manager.close()
    total = loss.detach() / size
    dist.all_reduce(total)
    if rank == 0:
        kept = ", ".join(path.name for path in manager.checkpoints())
        print(f"began at step {first}; checkpoints: {kept}")
        print(f"{size} processes, skipped {optimizer.skipped_steps} of 100; loss {total.item():.4f}")
    dist.destroy_process_group()


def folder_of_all(rank: int) -> str:
    """The folder given on the command line, else a temporary one that the first process makes."""
    given = [sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(given, src=0)
    return given[0]


if __name__ == "__main__":
    main()
