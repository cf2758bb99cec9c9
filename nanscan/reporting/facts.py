"""What a log holds beside the steps: the environment of the run, and now and then the norm of each layer."""

from __future__ import annotations

import functools
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nanscan._version import __version__
from nanscan.report import ScanSource
from nanscan.reporting.layers import coarser, layer_of

if TYPE_CHECKING:
    from nanscan.report import StepReport

__all__ = ["Rhythm", "layer_norms", "run_facts"]

MAX_LAYERS = 256
PACKAGES = ("torch", "numpy", "paddle", "lightning", "transformers", "accelerate")
ENGINE = ("engine", "why", "instruction_set", "threads", "cuda")
MAX_PARAMETERS = 2000
COLUMNS = 256  # the first so many steps are noted one by one; then each distance is at most 1/128 of the way


class Rhythm:
    """When something that takes room is written: often at first, then ever more rarely, without knowing the end.

    >>> rhythm = Rhythm()
    >>> due = [step for step in range(100_000) if rhythm.due(step)]
    >>> due[:3], due[-1] - due[-2], len(due)
    ([0, 1, 2], 512, 1348)
    """

    @staticmethod
    def due(step: int) -> bool:
        """True if step number `step`, from 0, is one of those."""
        return step % (1 << (step // COLUMNS).bit_length()) == 0


def layer_norms(report: StepReport) -> dict[str, float]:
    """Layer -> the 2-norm of its gradients, 4 digits; NaN or inf where it holds a NaN or Inf. At most 256 layers."""
    norms: dict[str, list[float]] = {}
    pairs = list(_named_norms(report))
    for (_, norm), layer in zip(pairs, _layers(tuple(name for name, _ in pairs)), strict=True):
        norms.setdefault(layer, []).append(norm)
    return {layer: float(f"{_joint(parts):.4g}") for layer, parts in norms.items()}


def _named_norms(report: StepReport) -> Iterator[tuple[str, float]]:
    """Name and norm of each gradient; from the engine's rows where they are still there, which is 5 times as fast."""
    source = vars(report).get("_source")
    if not isinstance(source, ScanSource):
        yield from ((row.name, row.norm) for row in report.tensors if row.kind == "grad")
        return
    for row in source.scan.rows():
        label = source.labels[row.position]
        if label.kind == "grad":
            yield label.names[0], math.nan if row.nan_count else math.inf if row.inf_count else row.finite_norm


@functools.lru_cache(maxsize=8)
def _program() -> str:
    """The script; of `python -m package` the package, whose script is called `__main__.py`."""
    script = sys.argv[0] if sys.argv else ""
    folder, name = os.path.split(script)
    return f"-m {os.path.basename(folder)}" if name == "__main__.py" and folder else name


def _layers(names: tuple[str, ...]) -> list[str]:
    """The layer of each tensor, for all steps of an optimizer."""
    own = [layer_of(name) for name in names]
    groups = coarser(list(dict.fromkeys(own)), MAX_LAYERS)
    return [groups[layer] for layer in own]


def _joint(norms: Sequence[float]) -> float:
    return math.nan if any(norm != norm for norm in norms) else math.hypot(*norms)  # hypot(inf, nan) is inf


def run_facts(report: StepReport, settings: dict[str, Any]) -> dict[str, Any]:
    """Versions, engine, devices and parameters: what makes a log readable a year later.

    Args:
        report: of the first step, with its table.
        settings: what the guard was told; its `engine`, if it has one, is that of the run.
    """
    rows = [row for row in report.tensors if row.kind == "grad"]
    return {
        "nanscan": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES if _loaded(name)},
        "devices": sorted({row.device for row in rows}),
        "gpus": _gpus(),
        "engine": settings.get("engine") or _engine(),
        "program": _program(),
        "process": os.getpid(),
        "settings": settings,
        "numel": report.numel,
        "tensors": len(rows),
        "parameters": [[row.name, list(row.shape), row.dtype] for row in rows[:MAX_PARAMETERS]],
    }


def _loaded(name: str) -> bool:
    return name in sys.modules  # nothing is imported for a log


def _version(name: str) -> str:
    return str(getattr(sys.modules[name], "__version__", "?"))


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _engine() -> dict[str, Any]:
    if not _loaded("torch"):
        return {}
    from nanscan.engine.info import engine_info

    info = engine_info().to_dict()
    return {name: info[name] for name in ENGINE if name in info}
