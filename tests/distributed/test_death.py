"""A rank that dies where only an observed loss brings DDP a collective: the other ends with an error, soon."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.distributed.processes import TIMEOUT, join_group, run_to_the_end


def rank_main(rank: int, folder: str) -> None:
    """Two steps; in the second, rank 1 kills itself after backward while rank 0 is in `optimizer.step()`."""
    join_group(rank, f"{folder}/init")
    import nanscan
    from tests.distributed.layouts import LAYOUTS, batch

    run = LAYOUTS["ddp"](rank, 2)
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


def test_the_others_end_with_an_error_when_a_rank_is_killed_before_it_tells_its_loss(tmp_path: Path) -> None:
    assert run_to_the_end(rank_main, str(tmp_path)) == [3, -signal.SIGKILL]
    seconds, text = (tmp_path / "error").read_text().split("\n", 1)
    assert float(seconds) < TIMEOUT + 5
    assert "the verdict on the gradients of step 1 could not be shared between the ranks [0, 1]" in text
    assert "has died" in text
