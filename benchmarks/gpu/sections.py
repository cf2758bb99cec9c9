"""The sections in the order they run, each with the time it may take."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from benchmarks.gpu.result import Section


@dataclass(frozen=True)
class Entry:
    """One section: where its function is, its time in seconds, and what it does, for a reader."""

    function: str
    seconds: float
    what: str

    def run(self) -> Section:
        module, name = self.function.split(":")
        section: Section = getattr(import_module(f"benchmarks.gpu.{module}"), name)()
        return section


SECTIONS: dict[str, Entry] = {
    "build": Entry("build:build", 100, "install with the CUDA engine required, else build on first use"),
    "correct": Entry("correct:correct", 45, "answers against float64, equal bits, more than 2^31 elements"),
    "tests": Entry("suite:run_tests", 100, "the GPU tests, skipping forbidden"),
    "graph": Entry("graph:replay", 25, "graph capture, 1,000 replays"),
    "counts": Entry("counts:counts", 30, "kernel launches and host waits per guarded step"),
    "ranks": Entry("ranks:ranks", 30, "NCCL, DDP and FSDP2 as a group of one; several cards are untested"),
    "bandwidth": Entry("bandwidth:bandwidth", 50, "bandwidth against a device copy of the same bytes"),
    "step": Entry("step:step", 40, "guarded fused step against bare and torch's clipping"),
    "sanitizer": Entry("sanitize:sanitize", 90, "compute-sanitizer: memcheck, racecheck, synccheck"),
}
