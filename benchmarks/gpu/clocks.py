"""Timing on the card: by its own events, or by the wall clock around work that is waited for."""

from __future__ import annotations

import time

import torch

from nanscan.bench.timing import Command, Plan


def event_clock(command: Command, repeats: int) -> float:
    """Seconds per call, by the card's events: launches queue up, the host's time hides behind the card's."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        command()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / repeats


def waited_clock(command: Command, repeats: int) -> float:
    """Seconds per call, by the host's clock, until the card is done with all of them."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        command()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def event_plan(seconds: float) -> Plan:
    return Plan(seconds=seconds, min_rounds=5, max_rounds=200, block=2e-3, timer=event_clock)


def waited_plan(seconds: float) -> Plan:
    return Plan(seconds=seconds, min_rounds=5, max_rounds=200, block=5e-3, timer=waited_clock)
