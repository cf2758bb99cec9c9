"""compute-sanitizer over a small set of scans: out-of-bounds and uninitialised reads, races, misplaced barriers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.build import ROOT
from benchmarks.gpu.result import Section

TOOLS = ("memcheck", "racecheck", "synccheck")
FAULT = 99  # the exit code asked of compute-sanitizer for a finding
LIMIT = 75.0  # seconds for each tool; they run side by side


def sanitize() -> Section:
    """The three tools at the same time, each over ``sanitize_target.py``."""
    section = Section()
    tool = _find()
    if tool is None:
        section.check("compute-sanitizer was found", False, "it is neither on PATH nor in a CUDA toolkit: not run")
        return section
    started = {name: _start(tool, name) for name in TOOLS}
    end = time.monotonic() + LIMIT
    for name, process in started.items():
        try:
            output, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            section.check(name, False, f"not finished after {LIMIT:.0f} s: nothing can be said")
        else:
            _judge(section, name, process.returncode, output)
        section.figures[name] = {"returncode": process.returncode, "output": output[-3000:]}
    return section


def _judge(section: Section, name: str, code: int, output: str) -> None:
    summary = [line.strip("= ") for line in output.splitlines() if "SUMMARY" in line]
    finished = "all probes right" in output
    section.check(name, code == 0 and finished, "; ".join(summary) or f"exit code {code}, no summary")


def _start(tool: str, name: str) -> subprocess.Popen[str]:
    command = [
        tool,
        "--tool",
        name,
        "--error-exitcode",
        str(FAULT),
        sys.executable,
        "-m",
        "benchmarks.gpu.sanitize_target",
    ]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor its own allocation: no slack
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _find() -> str | None:
    """compute-sanitizer on PATH, else beside nvcc in the usual place."""
    if found := shutil.which("compute-sanitizer"):
        return found
    roots = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    places = [Path(root, part) for root in roots if root for part in ("bin", "compute-sanitizer")]
    return next((str(place / "compute-sanitizer") for place in places if (place / "compute-sanitizer").exists()), None)
