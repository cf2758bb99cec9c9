"""nanscan keeps training runs numerically healthy: one fused pass over the gradients says what is wrong and where.

Importing the package imports none of its parts: each is imported when its name is first used. So `import nanscan` is
quick, and a part that doesn't need PyTorch (`nanscan.integrations.paddle`) doesn't import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nanscan._version import __version__

if TYPE_CHECKING:  # for type checkers and editors; the table below is what runs
    from nanscan.batches import (
        BadBatch as BadBatch,
    )
    from nanscan.batches import (
        BatchProblem as BatchProblem,
    )
    from nanscan.batches import (
        BatchSpec as BatchSpec,
    )
    from nanscan.batches import (
        CheckedLoader as CheckedLoader,
    )
    from nanscan.batches import (
        FieldSpec as FieldSpec,
    )
    from nanscan.batches import (
        check_batch as check_batch,
    )
    from nanscan.checkpoint.load import load as load
    from nanscan.checkpoint.save import save as save
    from nanscan.clip import clip_grad_norm_ as clip_grad_norm_
    from nanscan.clipping import AdaptiveClip as AdaptiveClip
    from nanscan.clipping import Spike as Spike
    from nanscan.engine.info import engine_info as engine_info
    from nanscan.errors import (
        CheckpointError as CheckpointError,
    )
    from nanscan.errors import (
        CheckpointSystemError as CheckpointSystemError,
    )
    from nanscan.errors import (
        CheckpointWarning as CheckpointWarning,
    )
    from nanscan.errors import (
        CorruptCheckpoint as CorruptCheckpoint,
    )
    from nanscan.errors import (
        EngineError as EngineError,
    )
    from nanscan.errors import (
        NonFiniteError as NonFiniteError,
    )
    from nanscan.errors import (
        NonFiniteWarning as NonFiniteWarning,
    )
    from nanscan.errors import (
        TrainingDiverged as TrainingDiverged,
    )
    from nanscan.guard import GuardedOptimizer as GuardedOptimizer
    from nanscan.guard import wrap as wrap
    from nanscan.manager import CheckpointManager as CheckpointManager
    from nanscan.manager import Restored as Restored
    from nanscan.microbatches import MicrobatchReport as MicrobatchReport
    from nanscan.origin import Origin as Origin
    from nanscan.origin import find_origin as find_origin
    from nanscan.origin.trace import trace as trace
    from nanscan.pickling import PickleProblem as PickleProblem
    from nanscan.pickling import find_unpicklable as find_unpicklable
    from nanscan.pickling.transient import TransientState as TransientState
    from nanscan.preflight_checks import Finding as Finding
    from nanscan.preflight_checks import preflight as preflight
    from nanscan.ranges import OutOfRange as OutOfRange
    from nanscan.ranges import RangeRow as RangeRow
    from nanscan.ranges import Watch as Watch
    from nanscan.ranges import watch as watch
    from nanscan.recovery import Recovery as Recovery
    from nanscan.report import Report as Report
    from nanscan.report import StepReport as StepReport
    from nanscan.report import TensorReport as TensorReport
    from nanscan.scaling.grad_scaler import GradScaler as GradScaler
    from nanscan.scanning import scan as scan

_PUBLIC = {
    "nanscan.batches": (
        "BadBatch",
        "BatchProblem",
        "BatchSpec",
        "CheckedLoader",
        "FieldSpec",
        "check_batch",
    ),
    "nanscan.checkpoint.load": ("load",),
    "nanscan.checkpoint.save": ("save",),
    "nanscan.clip": ("clip_grad_norm_",),
    "nanscan.clipping": (
        "AdaptiveClip",
        "Spike",
    ),
    "nanscan.engine.info": ("engine_info",),
    "nanscan.errors": (
        "CheckpointError",
        "CheckpointSystemError",
        "CheckpointWarning",
        "CorruptCheckpoint",
        "EngineError",
        "NonFiniteError",
        "NonFiniteWarning",
        "TrainingDiverged",
    ),
    "nanscan.guard": (
        "GuardedOptimizer",
        "wrap",
    ),
    "nanscan.manager": (
        "CheckpointManager",
        "Restored",
    ),
    "nanscan.microbatches": ("MicrobatchReport",),
    "nanscan.origin": ("Origin", "find_origin"),
    "nanscan.origin.trace": ("trace",),
    "nanscan.pickling": (
        "PickleProblem",
        "find_unpicklable",
    ),
    "nanscan.pickling.transient": ("TransientState",),
    "nanscan.preflight_checks": (
        "Finding",
        "preflight",
    ),
    "nanscan.ranges": (
        "OutOfRange",
        "RangeRow",
        "Watch",
        "watch",
    ),
    "nanscan.recovery": ("Recovery",),
    "nanscan.report": (
        "Report",
        "StepReport",
        "TensorReport",
    ),
    "nanscan.scaling.grad_scaler": ("GradScaler",),
    "nanscan.scanning": ("scan",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return value
    if name.startswith("_"):
        raise AttributeError(f"module 'nanscan' has no attribute {name!r}")
    try:
        return importlib.import_module(f"nanscan.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"nanscan.{name}":
            raise
        raise AttributeError(f"module 'nanscan' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
