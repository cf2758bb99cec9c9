"""`torchrun --max-restarts`: a rank is lost, torchrun starts all anew, and the run ends as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
# Else torchrun's own store outlives the first start, and the second finds the addresses of the dead in it.
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def test_a_run_that_torchrun_restarts_after_a_lost_rank_ends_bit_for_bit_as_an_undisturbed_one(
    worlds: dict[int, Ranks], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "-m", "tests.distributed.restarted_training", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **NEW_STORE}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "failed (exitcode: -9) local_rank: 1" in done.stderr
    assert not list(tmp_path.glob("start-0-*"))
    ended = [json.loads((tmp_path / f"start-1-rank-{rank}.json").read_text()) for rank in (0, 1)]
    undisturbed = worlds[2].of("tests.distributed.restarted_training").run("trained", str(tmp_path / "undisturbed"))
    assert [told["from"] for told in ended] == [4, 4] and [first for first, _ in undisturbed] == [0, 0]
    assert [told["values"] for told in ended] == [values for _, values in undisturbed]
