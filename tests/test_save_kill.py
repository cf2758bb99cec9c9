"""A process that is killed inside `nanscan.save` leaves a complete file, and its temporary file does not stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_sixty_kills_at_random_moments_leave_a_complete_file(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_saves.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "60", "last.pt"],
        capture_output=True, text=True, env=environment, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["found"] == ["complete"] * 60
    assert sum(result["leftovers"]) >= 5, "the kills did not hit inside a save"
    assert max(result["leftovers"]) <= 1, "temporary files pile up"
    assert result["end"] == ["last.pt"]
