"""Activation and gradient ranges per module, step by step, with the run-up to the first that leaves its range."""

from nanscan.ranges.row import OutOfRange, RangeRow
from nanscan.ranges.watcher import Watch, watch

__all__ = ["OutOfRange", "RangeRow", "Watch", "watch"]
