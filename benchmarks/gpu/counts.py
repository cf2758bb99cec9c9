"""Kernel launches and waits of one guarded step, counted by torch's profiler, next to a bare step."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

import nanscan
from benchmarks.gpu.result import Section
from nanscan.bench import workload
from nanscan.bench.gradients import make_gradients
from nanscan.bench.step_rows import Twins
from nanscan.bench.timing import Command

STEPS = 20
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def counts() -> Section:
    """Launches, copies and waits per step: bare, guarded, guarded with clipping, torch's clipping."""
    section = Section()
    twins = Twins(make_gradients(workload("resnet50").shapes, device="cuda"), fused=True)
    commands = _commands(twins)
    found = {name: _per_step(command) for name, command in commands.items()}
    section.figures["per_step"] = found
    for name, figures in found.items():
        section.say(f"{name:<18} " + ", ".join(f"{key} {value:g}" for key, value in figures.items()))
    for name in ("guarded", "guarded, clipped"):
        extra = {key: found[name][key] - found["bare"][key] for key in found["bare"]}
        section.check(f"{name}: no wait", extra["waits"] <= 0, f"{extra['waits']:g} more than a bare step")
        section.check(f"{name}: at most two launches more", extra["kernels"] <= 2, f"{extra['kernels']:g}")
        problem = _sync_problem(commands[name])
        section.check(f"{name}: torch's sync debug mode sees none", not problem, problem)
    return section


def _commands(twins: Twins) -> dict[str, Command]:
    clipped, parameters = twins.optimizer(), twins.made.parameters

    def torch_clip() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        clipped.step()

    return {
        "bare": twins.optimizer().step,
        "guarded": nanscan.wrap(twins.optimizer()).step,
        "guarded, clipped": nanscan.wrap(twins.optimizer(), clip_norm=1.0).step,
        "torch clip": torch_clip,
    }


def _per_step(command: Command) -> dict[str, float]:
    """What ``STEPS`` steps brought beyond an empty profile, per step."""
    for _ in range(5):
        command()
    empty, full = _profiled(command, 0), _profiled(command, STEPS)
    return {key: round((full[key] - empty[key]) / STEPS, 2) for key in ("kernels", "copies", "memsets", "waits")}


def _profiled(command: Command, steps: int) -> Counter[str]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for _ in range(steps):
            command()
    torch.cuda.synchronize()
    return Counter(_kind(event) for event in prof.events())


def _kind(event: Any) -> str:
    """Sorts one profiler event: work on the card by its name, waits of the host by theirs."""
    if getattr(event, "is_user_annotation", False):  # a span such as "Optimizer.step#AdamW.step", no work
        return "other"
    if event.device_type == DeviceType.CUDA:
        name = event.name.lower()
        return "copies" if name.startswith("memcpy") else "memsets" if name.startswith("memset") else "kernels"
    return "waits" if event.name in WAITS else "other"


def _sync_problem(command: Command) -> str:
    """What torch's own detector of waits says of ten steps; empty if nothing."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            command()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""
