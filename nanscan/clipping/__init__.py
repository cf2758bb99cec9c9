"""Clipping: by a fixed limit, by one that follows the run, and what counts as a spike."""

from __future__ import annotations
