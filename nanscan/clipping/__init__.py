"""Clipping: by a fixed limit, by one that follows the run, and what counts as a spike."""

from __future__ import annotations

from nanscan.clipping.adaptive import AdaptiveClip
from nanscan.clipping.record import Spike

__all__ = ["AdaptiveClip", "Spike"]
