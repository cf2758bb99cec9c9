"""A script for torchrun: trains shards with checkpoints and goes on from the newest; its first start loses rank 1.

Run: torchrun --standalone --nproc-per-node 2 --max-restarts 1 -m tests.distributed.restarted_training FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nanscan
from tests.distributed.checkpoint_scenarios import Run, seeded

LAST, FATAL = 8, 5  # steps; a checkpoint after each second one


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, start = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    first, values = trained(rank, folder, FATAL if start == 0 and rank == 1 else None)
    Path(folder, f"start-{start}-rank-{rank}.json").write_text(json.dumps({"from": first, "values": values}))
    dist.destroy_process_group()


def trained(rank: int, folder: str, fatal: int | None = None) -> tuple[int, dict[str, Any]]:
    """(the step it went on from, values at the end); with a fatal step, SIGKILL in the middle of that."""
    seeded(rank)
    run = Run(rank, "fsdp")
    with nanscan.CheckpointManager(f"{folder}/checkpoints", every_steps=2, background=False) as manager:
        restored = manager.restore(**run.parts)
        first = 0 if restored is None else restored.step
        for step in range(first, LAST):
            if step == fatal:
                run.layout.inner.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            run.train(step, step + 1)
            manager.save(step + 1, **run.parts)
    return first, run.values()


if __name__ == "__main__":
    main(*sys.argv[1:])
