"""Build on the machine with the card: an editable installation, else on first use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.result import Section

ROOT = Path(__file__).resolve().parents[2]
LOAD = """
from nanscan.engine.build import load_cuda_library, load_native
print("CPU engine :", load_native(required=True).__file__)
print("CUDA engine:", load_cuda_library(required=True))
"""


def build() -> Section:
    """``pip install -e .`` with the CUDA part required; where that fails, the build on first use."""
    section = Section()
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "-e", "."]
    installed, seconds, output = _run(pip, NANSCAN_CUDA="1")
    section.figures["pip_install"] = {"ok": installed, "seconds": seconds, "output": output[-2000:]}
    section.say(f"pip install -e . {'worked' if installed else 'failed'} in {seconds:.1f} s")
    if not installed:
        section.say(output.strip().splitlines()[-1] if output.strip() else "no output")
    loaded, seconds, output = _run([sys.executable, "-c", LOAD], NANSCAN_CUDA="1")
    section.figures["load"] = {"ok": loaded, "seconds": seconds, "output": output[-2000:]}
    section.check("both engines load", loaded, f"{seconds:.1f} s{'' if installed else ', built on first use'}")
    for line in output.strip().splitlines()[-6:]:
        section.say(line)
    return section


def _run(command: list[str], **variables: str) -> tuple[bool, float, str]:
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode == 0, time.perf_counter() - start, done.stdout
