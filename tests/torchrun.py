"""Runs a command that starts processes with gloo, whose very end PyTorch may spoil."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

CRASH_AT_EXIT = "terminate called without an active exception"


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it, and once more if PyTorch crashed when the script had ended.

    A thread of gloo may free the tensor of the last collective while Python shuts down, when it can't have the GIL any
    more, and C++ then ends the process. `destroy_process_group` does not wait for these threads after a
    DistributedDataParallel, with or without nanscan. It is rare: a busy machine has to stop that thread just then.
    """
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode and CRASH_AT_EXIT in done.stderr:
        done = subprocess.run(command, capture_output=True, text=True, **options)
    return done
