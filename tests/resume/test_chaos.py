"""The example job is killed by ckpt-chaos at every file event of its saves, resumed, and compared.

The job takes five seconds to import and a tenth to train. So the command that ckpt-chaos runs is a client that has a
process forked in which everything is imported already; that process is armed as ckpt-chaos arms its own.
"""

from __future__ import annotations

import json
import os
import re
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.resume.forks import Warm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "checkpointed_training.py"
SIZE = ["--epochs", "2", "--batch-size", "300", "--every", "2", "--keep", "99"]  # 10 steps, 5 checkpoints

SETUP = """
import os, runpy, sys, warnings
warnings.simplefilter("ignore", UserWarning)
import torch
import ckpt_chaos.inject, ckpt_chaos.targets.common
from tests.resume.train_digits import build
build()
"""
CHILD = """
arguments, variables = {job!r}
os.environ.update(variables)
ckpt_chaos.targets.common.arm_from_env(0, lazy=True)
sys.argv = [{example!r}, *arguments]
runpy.run_path({example!r}, run_name="__main__")
sys.stdout.flush()
os._exit(0)  # taking the interpreter down takes longer than the job
"""
CLIENT = """
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
variables = {k: v for k, v in os.environ.items() if k.startswith("CKPT_CHAOS_") and k != "CKPT_CHAOS_ARMED"}
server.sendall(json.dumps([sys.argv[2:], variables]).encode() + b"\\n")
output, status = json.loads(server.makefile().readline())
print(output)
sys.exit(status)
"""


class Jobs(socketserver.UnixStreamServer):
    """Runs one job after the other for the clients."""

    def __init__(self, path: Path, warm: Warm) -> None:
        self.warm = warm
        super().__init__(str(path), JobHandler)


class JobHandler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Jobs)
        job = json.loads(self.rfile.readline())
        child = self.server.warm.fork(CHILD.format(job=job, example=str(EXAMPLE)))
        status = child.wait()
        answer = [child.output() + child.errors(), status if status >= 0 else 1]
        self.wfile.write(json.dumps(answer).encode() + b"\n")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("jobs") / "socket"
    with Warm(SETUP) as warm, Jobs(path, warm) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield path
        server.shutdown()
        thread.join()


def run_chaos(folder: Path, job: list[str], *options: str) -> Any:
    chaos = [sys.executable, "-m", "ckpt_chaos", "run", "--work", str(folder / "work"), *options]
    chaos += ["--checkpoint-glob", "{out}/checkpoints/step-*.pt", "--result-file", "{out}/final.pt"]
    chaos += ["--step-regex", r"resumed from step (\d+)", "--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*chaos, "--", *job], capture_output=True, text=True, env=environment, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["foreground", "background"])
def test_job_killed_at_every_file_event_resumes_from_the_newest_checkpoint_and_ends_the_same(
    jobs: Path, tmp_path: Path, mode: str
) -> None:
    job = [sys.executable, "-c", CLIENT, str(jobs), "--out", "{out}", *SIZE]
    done = run_chaos(tmp_path, [*job, *(["--foreground"] if mode == "foreground" else [])])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 checkpoints in the fault-free run, steps [2, 4, 6, 8, 10]" in done.stdout
    found = re.search(r"(\d+) file events -> (\d+) crash points", done.stdout)
    assert found is not None
    events, points = map(int, found.groups())
    assert points >= events >= 13  # the folder, two for each checkpoint, two for the result
    assert len(re.findall(r"\bPASS\b", done.stdout)) >= points
    assert not re.search("HARD_FAIL|SILENT_DIVERGENCE|LOST_WORK|CONTROL_FAIL", done.stdout)
