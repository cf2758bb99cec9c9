"""`destroy_process_group` and a second `init_process_group`: made anew all works, else an error says what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import join_group, run_to_the_end


def rank_main(rank: int, folder: str, name: str) -> None:
    """Train, end the group, step without one, make a second one, and go on with the same guard and manager."""
    import torch.distributed as dist

    join_group(rank, f"{folder}/first")
    import nanscan
    from tests.distributed.checkpoint_scenarios import Run, outcome, seeded

    seeded(rank)
    run = Run(rank, name)
    told: dict[str, Any] = {}
    manager = nanscan.CheckpointManager(f"{folder}/checkpoints", background=False, **run.layout.options)
    run.train(0, 2)
    manager.save(2, **run.parts)
    dist.destroy_process_group()
    run.optimizer.observe(1.0)
    told["ended"] = outcome(run.optimizer.step)
    join_group(rank, f"{folder}/second")
    run.optimizer.observe(1.0)
    told["not wrapped again"] = outcome(run.optimizer.step)
    again = Run(rank, name)
    restored = manager.restore(**again.parts)
    told["from"] = restored.step if restored else None
    again.train(2, 4)
    manager.save(4, **again.parts)
    guarded = nanscan.wrap(run.optimizer, again.layout.model, **again.layout.options)  # the old guard, the new group
    guarded.param_groups[0]["params"] = list(again.layout.model.parameters())
    guarded.observe(float("nan") if rank == 1 else 1.0)
    told["skips"] = (outcome(guarded.step), guarded.step_was_skipped)
    told["numbers"] = [one._agreement.number for one in (again.optimizer, guarded)]
    told["kept"] = [path.name.partition(".")[0] for path in manager.checkpoints()]
    manager.close()
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    os._exit(0)


@pytest.mark.parametrize("name", ["fsdp", "ddp_with_group"])
def test_a_second_process_group_works_for_what_is_made_anew_and_is_explained_for_the_rest(
    tmp_path: Path, name: str
) -> None:
    assert run_to_the_end(rank_main, str(tmp_path), name) == [0, 0]
    for rank in (0, 1):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        for when in ("ended", "not wrapped again"):
            assert (
                "was ended by destroy_process_group()" in told[when] and "nanscan.wrap(optimizer, model)" in told[when]
            )
        assert told["from"] == 2 and told["kept"] == ["step-00000002", "step-00000004"]
        assert told["skips"] == ["", True] and told["numbers"] == [0, 1]
