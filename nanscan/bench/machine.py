"""On what a figure was measured: without this a figure says nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import nanscan

__all__ = ["machine"]


def machine() -> dict[str, Any]:
    """Processor, threads, memory, versions and engine of this process, as plain data.

    Example:
        >>> sorted(machine())
        ['cores', 'cpu', 'engine', 'gpu', 'nanscan', 'python', 'system', 'threads', 'torch']
    """
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nanscan": nanscan.__version__,
        "engine": str(nanscan.engine_info()),
    }


def _processor() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
