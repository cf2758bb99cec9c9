"""What a machine without a compiler gets: tests of the guard and of micro-batches, once more on PyTorch's operators."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = [str(HERE / name) for name in ("test_microbatches.py", "test_guard_closures.py")]


def test_guard_does_the_same_without_the_compiled_engine() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["NANSCAN_ENGINE"] = "eager"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES]
    ran = subprocess.run(command, env=env, cwd=HERE.parent, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
    assert " passed" in ran.stdout
