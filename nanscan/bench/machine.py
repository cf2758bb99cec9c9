"""On what a figure was measured: without this a figure says nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from nanscan._version import __version__
from nanscan.engine.info import engine_info

__all__ = ["describe", "machine"]


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
        "nanscan": __version__,
        "engine": engine_info().to_dict(),
    }


def describe(host: dict[str, Any]) -> str:
    """One line of what ``machine`` says, to stand under a table."""
    engine = host["engine"]
    parts = (host["cpu"], f"{host['threads']} threads", host["gpu"], f"torch {host['torch']}")
    return ", ".join(part for part in parts if part) + f"; engine: {engine['engine']} ({engine['instruction_set']})"


def _processor() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
