"""Checkpoints of a run in a folder: when to save, what to keep, how to resume."""

from nanscan.manager.manager import CheckpointManager
from nanscan.manager.restored import PassedOver, Restored

__all__ = ["CheckpointManager", "PassedOver", "Restored"]
