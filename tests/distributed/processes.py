"""Processes that may die: ranks of their own for tests after which the pool of `tests.ranks` would be useless."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.ranks import new_processes

TIMEOUT = 60.0  # of the groups, in seconds


def run_to_the_end(
    main: Callable[..., None], *arguments: Any, terminate: Sequence[int] = (), ready: Path | None = None
) -> list[int | None]:
    """The exit codes of two new processes that run `main(rank, *arguments)`; None where one did not end.

    As soon as the file `ready` is there, those in `terminate` get a SIGTERM.
    """
    context = new_processes()
    ranks = [context.Process(target=main, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    while terminate and ready is not None and not ready.exists() and any(process.is_alive() for process in ranks):
        time.sleep(0.02)
    for rank in terminate:
        ranks[rank].terminate()
    for process in ranks:
        process.join(3 * TIMEOUT)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return codes


def join_group(rank: int, meeting: str) -> None:
    """`init_process_group` with gloo; the ranks meet at a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=limit)
