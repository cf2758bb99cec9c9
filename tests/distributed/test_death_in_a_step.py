"""A rank that is killed within a step: the others end with an error, soon; a restart resumes bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import TIMEOUT, join_group, run_to_the_end
from tests.ranks import Ranks

LAST, FATAL = 8, 5  # steps; a checkpoint after each second one
PLACES = [("fsdp", "backward"), ("fsdp", "verdict"), ("fsdp", "step"), ("ddp", "backward"), ("ddp", "step")]


def rank_main(rank: int, folder: str, name: str, place: str) -> None:
    """Train with checkpoints in the background; rank 1 kills itself in a step while rank 0 goes on with it."""
    join_group(rank, f"{folder}/init")
    from tests.distributed.checkpoint_scenarios import Run, seeded

    seeded(rank)
    run = Run(rank, name)
    if rank == 1:
        die_in_step(run, place)
    started = time.monotonic()
    try:
        go_on(run, folder, 0)
    except RuntimeError as error:
        told = {"seconds": time.monotonic() - started, "type": type(error).__name__, "error": str(error)}
        Path(folder, "told.json").write_text(json.dumps(told))
        os._exit(3)


def die_in_step(run: Any, place: str) -> None:
    """SIGKILL at the fatal step: within backward, after it while others share the verdict, or when it is shared."""

    def fatal(*_: Any) -> None:
        if run.at == FATAL:
            time.sleep(1.0)  # the other waits
            os.kill(os.getpid(), signal.SIGKILL)

    if place == "backward":
        inner = run.layout.model.module if run.is_ddp else run.layout.model
        inner.down.register_full_backward_hook(fatal)
    elif place == "step":
        run.layout.inner.register_step_post_hook(fatal)
    else:
        take = run.optimizer.step
        run.optimizer.step = lambda: (fatal(), take())


def go_on(run: Any, folder: str, first: int) -> None:
    import nanscan

    with nanscan.CheckpointManager(f"{folder}/checkpoints", every_steps=2, process_group=True) as manager:
        if first:
            restored = manager.restore(**run.parts)
            assert restored is not None and restored.step == first
        for step in range(first, LAST):
            run.at = step
            run.train(step, step + 1)
            manager.save(step + 1, **run.parts)


def resumed(rank: int, folder: str, name: str, first: int) -> dict[str, Any]:
    """The values at the end, in a process of the pool."""
    from tests.distributed.checkpoint_scenarios import Run, seeded

    seeded(rank)
    run = Run(rank, name)
    go_on(run, folder, first)
    return run.values()


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_a_rank_killed_in_a_step_ends_the_others_and_a_restart_resumes_bit_for_bit(
    worlds: dict[int, Ranks], tmp_path: Path, name: str, place: str
) -> None:
    assert run_to_the_end(rank_main, str(tmp_path), name, place) == [3, -signal.SIGKILL]
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["seconds"] < TIMEOUT
    words = {
        "backward": "Connection closed by peer",  # of torch's own reduction
        "verdict": "the verdict on the gradients of step 5 could not be shared between the ranks [0, 1]",
        "step": "whether to save step 6 could not be shared between the ranks [0, 1]",
    }
    assert words[place] in told["error"]
    pool = worlds[2].of(__name__)
    again = pool.run("resumed", str(tmp_path), name, 4)
    undisturbed = pool.run("resumed", str(tmp_path / "other"), name, 0)
    assert again == undisturbed
