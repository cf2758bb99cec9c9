"""Answers on the card against float64 on the host, and equal bits from run to run."""

from __future__ import annotations

import torch

from benchmarks.gpu.probes import probes
from benchmarks.gpu.result import Section
from nanscan import engine
from nanscan.engine.info import engine_info


def correct() -> Section:
    """Every probe, then 100 scans of one list whose results must have the same bits."""
    section = Section()
    info = engine_info()
    section.figures["engine"] = info.to_dict()
    section.check(
        "the CUDA engine is the native one", info.engine == "native" and info.cuda_path is not None, info.cuda_why
    )
    for probe in probes("cuda"):
        problem = probe.wrong(engine.scan(probe.tensors))
        section.check(probe.name, not problem, problem)
    section.check("100 scans give equal bits", _same_bits())
    section.check("a tensor of more than 2^31 elements", *_huge())
    return section


def _same_bits() -> bool:
    tensors = [torch.randn(size, device="cuda") for size in (10, 70_001, 3_000_000)]
    norms = {
        (scan.norm, *(row.finite_norm for row in scan.rows())) for scan in (engine.scan(tensors) for _ in range(100))
    }
    return len(norms) == 1


def _huge() -> tuple[bool, str]:
    size = 2**31 + 11
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * size:
        return True, f"not run: it needs {3 * size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
    tensor = torch.zeros(size, device="cuda", dtype=torch.float16)
    tensor[-2] = float("nan")
    row = engine.scan([tensor]).bad_rows()[0]
    return (row.nan_count, row.first_bad) == (1, size - 2), f"{row.nan_count} NaN, first at {row.first_bad}"
