"""Measure, in a process of its own, the most bytes that one scan takes: run by ``bench_memory.py`` under LD_PRELOAD.

Prints one JSON list. ``PYTHONMALLOC=malloc`` lets the counter see Python's own objects too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from nanscan import engine
from nanscan.bench import workload
from nanscan.bench.gradients import make_gradients
from nanscan.bench.shapes import Shape

CASES: dict[str, list[Shape]] = {
    "100 × 64": [(64,)] * 100,
    "1,000 × 64": [(64,)] * 1000,
    "10,000 × 64": [(64,)] * 10_000,
    "1 × 1 MB": [(2**18,)],
    "1 × 64 MB": [(2**24,)],
    "1 × 1 GB": [(2**28,)],
    "ResNet-50": list(workload("resnet50").shapes),
}


def counter() -> tuple[Callable[[], int], Callable[[], int]]:
    """The preloaded counter's two functions."""
    library = ctypes.CDLL(None)
    library.count_start.restype = library.count_peak.restype = ctypes.c_longlong
    return library.count_start, library.count_peak


def extra_bytes(groups: list[dict[str, object]]) -> int:
    """The peak above what was held before, while one scan runs and its result lives."""
    start, peak = counter()
    gc.collect()
    gc.disable()
    before = start()
    result = engine.scan_grads(groups)
    extra = peak() - before
    gc.enable()
    assert result.finite
    return extra


def main() -> None:
    groups = make_gradients([(64,)] * 16 + [(2**21,)]).param_groups
    for _ in range(3):
        extra_bytes(groups)  # loads the engine, wakes its threads
    found: list[dict[str, Any]] = []
    for name, shapes in CASES.items():
        made = make_gradients(shapes)
        first, again = extra_bytes(made.param_groups), extra_bytes(made.param_groups)
        sizes = [grad.numel() * grad.element_size() for grad in made.grads]
        found.append({"case": name, "tensors": len(sizes), "sizes": sizes, "first": first, "again": again})
        del made
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    torch.set_num_threads(max(2, torch.get_num_threads()))
    main()
