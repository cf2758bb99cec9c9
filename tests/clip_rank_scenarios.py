"""What each rank does in the tests of limits that follow the run, with `process_group=`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import nanscan
from tests.guarded import bits


def follow(rank: int, rule: str) -> Any:
    """Gradients and losses that differ from rank to rank; a norm spikes at step 40, a loss at 45, each on one rank."""
    weight = nn.Parameter(torch.zeros(1))
    clip = nanscan.AdaptiveClip(rule)  # type: ignore[arg-type]
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=0.1), clip_norm=clip, on_spike="skip", process_group=True)
    warnings.simplefilter("ignore")
    for step in range(50):
        generator = torch.Generator().manual_seed(step)
        value = 2.0 + float(torch.rand((), generator=generator)) + rank / 10
        weight.grad = torch.tensor([value * (1e6 if step == 40 and rank == 0 else 1.0)])
        if rank == 1 or step != 20:  # at one step one rank observes nothing
            optimizer.observe(value * (1e6 if step == 45 and rank == 1 else 1.0))
        optimizer.step()
    told = [(r.clip_factor, r.clip_limit, r.skipped, r.spike and r.spike.what) for r in optimizer.history]
    return told, bits(optimizer.guard_state_dict())
