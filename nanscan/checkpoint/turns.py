"""Lets other threads run while one writes a checkpoint.

A thread that lets go of Python's lock again and again, each time for a moment too short for another to wake up, as
each small write to a file does, starves the others: their request for the lock begins anew each time.
"""

from __future__ import annotations

import threading
import time

__all__ = ["give_way"]

_EVERY = 0.002  # seconds
_PAUSE = 0.00005
_latest = 0.0
_now = time.monotonic


def give_way() -> None:
    """Pause for a moment if the last pause is a while ago; not in the main thread, which nobody waits for."""
    global _latest
    if _now() - _latest > _EVERY:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(_PAUSE)
        _latest = _now()
