"""A scan captured in a CUDA graph and replayed a thousand times, with values that change between replays."""

from __future__ import annotations

import torch

from benchmarks.gpu.result import Section
from nanscan import engine
from nanscan.bench.gradients import Gradients, make_gradients

REPLAYS = 1000
EVERY = 7  # each so many replays sees a NaN


def replay() -> Section:
    """Flags and clip factors of 1,000 replays: right where a NaN was planted, equal bits everywhere else."""
    section = Section()
    for name, shapes in (("480 tensors", [(16, 768)] * 480), ("5,000 tensors", [(64,)] * 5000)):
        made = make_gradients(shapes, device="cuda")
        flags, scales = _replays(made)
        expected = [float(index % EVERY == EVERY - 1) for index in range(REPLAYS)]
        wrong = sum(found != wanted for found, wanted in zip(flags, expected, strict=True))
        section.check(f"{name}: found_inf of {REPLAYS} replays", wrong == 0, f"{wrong} wrong")
        healthy = {scale for scale, bad in zip(scales, expected, strict=True) if not bad}
        norm = float(torch.linalg.vector_norm(made.flat.double()))
        close = all(abs(scale / ((norm + 1e-6) / 1e-3) - 1.0) < 1e-6 for scale in healthy)
        section.check(f"{name}: grad_scale has equal bits", len(healthy) == 1 and close, f"{sorted(healthy)[:3]}")
    return section


def _replays(made: Gradients) -> tuple[list[float], list[float]]:
    """``found_inf`` and ``grad_scale`` of each replay, kept on the card until the end."""
    groups, victim = made.param_groups, made.grads[len(made.grads) // 2].view(-1)
    good = victim[5].clone()
    bad = torch.full_like(good, float("nan"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        engine.launch_grads(groups, clip_norm=1e-3).result()  # makes the workspace before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        deferred = engine.launch_grads(groups, clip_norm=1e-3)
    kept = torch.empty(2, REPLAYS, device="cuda")
    for index in range(REPLAYS):
        victim[5] = bad if index % EVERY == EVERY - 1 else good
        graph.replay()
        kept[0, index].copy_(deferred.found_inf)
        kept[1, index].copy_(deferred.grad_scale)
    victim[5] = good
    flags, scales = kept.tolist()
    return flags, scales
