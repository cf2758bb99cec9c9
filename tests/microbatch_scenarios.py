"""What each rank does in the tests of dropped micro-batches; every function runs on both ranks."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nanscan
from tests.guarded import NAN


def ddp_drops_on_all_ranks(rank: int, bad: list[tuple[int, int]], before: bool, sparse: bool = False) -> Any:
    """Three micro-batches of which the last one is reduced; `bad` lists (rank, micro-batch)."""
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Embedding(4, 2, sparse=sparse), nn.Linear(2, 1, bias=False))
    model = DistributedDataParallel(inner)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model)
    reports = []
    for micro in range(3):
        factor = NAN if (rank, micro) in bad else 1.0 + micro
        with contextlib.nullcontext() if micro == 2 else model.no_sync():
            loss = (model(torch.tensor([micro, 3 - rank])) * factor).mean() / 3
            if before and not optimizer.check_microbatch(loss, drop=True, before_backward=True).finite:
                continue
            loss.backward()
        reports.append(optimizer.check_microbatch(drop=True))
    optimizer.step()
    last = optimizer.last_report
    named = [(row.name, row.rank) for report in reports for row in report.bad]
    weights = [p.detach().flatten().tolist() for p in model.parameters()]
    return weights, last.dropped, last.skipped, named


def mean_of_the_rest(rank: int, kept: list[int]) -> Any:
    """The weights after a step with the kept micro-batches alone."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 1, bias=False))
    for micro in kept:
        for other in range(2):
            loss = (model(torch.tensor([micro, 3 - other])) * (1.0 + micro)).mean()
            (loss / len(kept) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return [p.detach().flatten().tolist() for p in model.parameters()]
