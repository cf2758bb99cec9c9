"""What compute-sanitizer watches: the small probes, scanned on the card, each answer checked."""

from __future__ import annotations

import sys

import torch

from benchmarks.gpu.probes import probes
from nanscan import engine


def main() -> int:
    """0 if every answer is right; prints what is not."""
    wrong = 0
    for probe in probes("cuda", dtypes=(torch.float32, torch.float16), small=True):
        if problem := probe.wrong(engine.scan(probe.tensors)):
            wrong += 1
            print(f"{probe.name}: {problem}")
    deferred = engine.launch_grads([{"params": [_with_grad(1000), _with_grad(70_003)]}], clip_norm=1.0)
    if deferred.found_inf.item() != 0.0 or not deferred.result().finite:
        wrong += 1
        print("launch_grads saw a NaN or Inf where there is none")
    print("all probes right" if not wrong else f"{wrong} wrong")
    return int(wrong > 0)


def _with_grad(size: int) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(size, device="cuda"))
    parameter.grad = torch.arange(size, dtype=torch.float32).to("cuda") * 1e-3
    return parameter


if __name__ == "__main__":
    sys.exit(main())
