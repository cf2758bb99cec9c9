"""A rank that dies in the middle of a step: the others end with an error, soon, that says what may have happened."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

TIMEOUT = 60.0  # of the group, in seconds


def rank_main(rank: int, folder: str, layout: str) -> None:
    """Two steps; in the second, rank 1 kills itself after backward while rank 0 is in `optimizer.step()`."""
    import torch
    import torch.distributed as dist

    import nanscan
    from tests.distributed.layouts import LAYOUTS, batch

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2, timeout=limit)
    run = LAYOUTS[layout](rank, 2)
    guarded = nanscan.wrap(run.inner, run.model)
    for step in range(2):
        guarded.zero_grad()
        run.model(batch(step).chunk(2)[rank]).square().mean().backward()
        guarded.observe(1.0)
        if step == 1 and rank == 1:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            guarded.step()
        except RuntimeError as error:
            Path(folder, "error").write_text(f"{time.monotonic() - started}\n{error}")
            os._exit(3)


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_the_others_end_with_an_error_when_a_rank_is_killed_in_a_step(tmp_path: Path, layout: str) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(rank, str(tmp_path), layout)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(2 * TIMEOUT)
    assert [process.exitcode for process in ranks] == [3, -signal.SIGKILL]
    seconds, text = (tmp_path / "error").read_text().split("\n", 1)
    assert float(seconds) < TIMEOUT + 5
    assert "the verdict on the gradients of step 1 could not be shared between the ranks [0, 1]" in text
    assert "has died" in text
