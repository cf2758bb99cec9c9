"""A real SIGTERM, to all ranks or to one of them: what is pending is written, and all end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.distributed.processes import join_group, run_to_the_end
from tests.ranks import Ranks

ENDLESS = 100_000


def rank_main(rank: int, folder: str, on_sigterm: str) -> None:
    """Train with a checkpoint at each fifth step, until a signal ends it; exit code 3 where another rank is missed."""
    join_group(rank, f"{folder}/init")
    import nanscan
    from tests.distributed.checkpoint_scenarios import Run, seeded

    seeded(rank)
    run = Run(rank, "fsdp")
    manager = nanscan.CheckpointManager(f"{folder}/checkpoints", every_steps=5, on_sigterm=on_sigterm)
    try:
        for step in range(ENDLESS):
            run.train(step, step + 1)
            manager.save(step + 1, **run.parts)
            if step == 12 and rank == 0:
                Path(folder, "ready").touch()
            if manager.stop_requested:
                manager.close()
                Path(folder, f"stopped-{rank}").write_text(str(step + 1))
                os._exit(0)
    except RuntimeError as error:
        Path(folder, f"error-{rank}").write_text(str(error))
        os._exit(3)


def newest(rank: int, folder: str) -> int:
    """The step of the newest checkpoint that verifies, restored by a process of the pool."""
    import nanscan
    from tests.distributed.checkpoint_scenarios import Run

    run = Run(rank, "fsdp")
    with nanscan.CheckpointManager(folder) as manager:
        restored = manager.restore(**run.parts)
    assert restored is not None
    return restored.step


@pytest.mark.parametrize(
    ("on_sigterm", "signalled", "codes"),
    [
        ("exit", (0, 1), [-signal.SIGTERM] * 2),
        ("exit", (1,), [3, -signal.SIGTERM]),
        ("stop", (0, 1), [0, 0]),
        ("stop", (1,), [0, 0]),
    ],
)
def test_sigterm_leaves_a_complete_checkpoint_and_nobody_waiting(
    worlds: dict[int, Ranks], tmp_path: Path, on_sigterm: str, signalled: tuple[int, ...], codes: list[int]
) -> None:
    folder = str(tmp_path)
    ended = run_to_the_end(rank_main, folder, on_sigterm, terminate=signalled, ready=tmp_path / "ready")
    assert ended == codes
    steps = worlds[2].of(__name__).run("newest", f"{folder}/checkpoints")
    assert steps[0] == steps[1] >= 10
    if on_sigterm == "stop":
        assert [(tmp_path / f"stopped-{rank}").read_text() for rank in (0, 1)] == [str(steps[0])] * 2
