"""A rank that is killed while the ranks write a checkpoint: the others end, and a restart takes the one before."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import nanscan
from tests.distributed.processes import join_group, run_to_the_end

LAST = 6


def rank_main(rank: int, folder: str, name: str, killed: bool) -> None:
    """Train to step 6 with a checkpoint at each second step, from the newest one on; rank 1 dies within the second."""
    join_group(rank, f"{folder}/{name}")
    from tests.distributed.checkpoint_scenarios import Run, seeded

    seeded(rank)
    run = Run(rank, "fsdp")
    if killed and rank == 1:
        die_when_writing("step-00000004/__1_0.distcp")
    told: dict[str, Any] = {"passed": []}
    try:
        with nanscan.CheckpointManager(f"{folder}/checkpoints", every_steps=2, background=False) as manager:
            restored = manager.restore(**run.parts)
            if restored is not None:
                told["passed"] = [item.path.name for item in restored.passed_over]
            told["from"] = first = restored.step if restored else 0
            for step in range(first, LAST):
                run.train(step, step + 1)
                manager.save(step + 1, **run.parts)
        told["values"] = run.values()
    except nanscan.CheckpointError as error:
        told["error"] = str(error)
    Path(folder, f"{name}-{rank}.json").write_text(json.dumps(told))
    os._exit(3 if "error" in told else 0)


def die_when_writing(name: str) -> None:
    """SIGKILL when this file is about to be flushed to the disk."""
    fsync = os.fsync

    def deadly(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(name):
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(fd)

    os.fsync = deadly


def started(folder: Path, name: str, killed: bool = False) -> tuple[list[int | None], list[Any]]:
    """(exit codes, what each rank told, None if nothing) of two processes."""
    codes = run_to_the_end(rank_main, str(folder), name, killed)
    files = [folder / f"{name}-{rank}.json" for rank in range(2)]
    return codes, [json.loads(file.read_text()) if file.exists() else None for file in files]


def test_a_rank_killed_in_a_save_ends_the_others_and_a_restart_resumes_bit_for_bit(tmp_path: Path) -> None:
    codes, (told, _) = started(tmp_path, "killed", killed=True)
    assert codes == [3, -signal.SIGKILL]
    assert "step-00000004" in told["error"] and "A rank has died" in told["error"]
    checkpoints = tmp_path / "checkpoints"
    assert not (checkpoints / "step-00000004" / "complete.json").exists()
    assert [path.name for path in nanscan.CheckpointManager(checkpoints).checkpoints()] == ["step-00000002"]
    codes, resumed = started(tmp_path, "resumed")
    assert codes == [0, 0]
    assert [(one["from"], one["passed"]) for one in resumed] == [(2, ["step-00000004"])] * 2
    for path in checkpoints.iterdir():
        path.rename(tmp_path / path.name)  # the same run, never disturbed
    codes, undisturbed = started(tmp_path, "undisturbed")
    assert codes == [0, 0] and [one["from"] for one in undisturbed] == [0, 0]
    assert [one["values"] for one in resumed] == [one["values"] for one in undisturbed]
