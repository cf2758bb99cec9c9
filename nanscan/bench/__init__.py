"""Measuring: what ``nanscan bench`` runs, and the pieces that ``benchmarks/`` measures with.

>>> result = quick_bench(["small"], seconds=0.1, steps=False)
>>> result.scan[0].tensors
1000
"""

from nanscan.bench.quick import DTYPES, BenchResult, quick_bench
from nanscan.bench.shapes import WORKLOADS, Workload, workload
from nanscan.bench.timing import Plan, Timings, interleave

__all__ = ["DTYPES", "WORKLOADS", "BenchResult", "Plan", "Timings", "Workload", "interleave", "quick_bench", "workload"]
