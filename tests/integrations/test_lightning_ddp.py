"""`NanScanCallback` under DDP: two ranks decide together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_all_ranks_skip_what_one_of_them_found(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.lightning_ddp", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["skipped"] == second["skipped"] == [3, 5]
    assert first["bad"][0] == second["bad"][0] == [["head.bias", 1]]
    assert first["steps"] == second["steps"] == 10
    assert first["weights"] == second["weights"]
    assert not first["rng_saved"]  # the ranks' random numbers differ, and a checkpoint is of the first
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "kind" not in line]) == 10
