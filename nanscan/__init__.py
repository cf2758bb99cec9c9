"""nanscan keeps training runs numerically healthy: one fused pass over the gradients says what is wrong and where."""

from nanscan._version import __version__
from nanscan.batches import BadBatch, BatchProblem, BatchSpec, CheckedLoader, FieldSpec, check_batch
from nanscan.checkpoint.load import load
from nanscan.checkpoint.save import save
from nanscan.clip import clip_grad_norm_
from nanscan.engine.info import engine_info
from nanscan.errors import (
    CheckpointError,
    CheckpointSystemError,
    CheckpointWarning,
    CorruptCheckpoint,
    EngineError,
    NonFiniteError,
    NonFiniteWarning,
    TrainingDiverged,
)
from nanscan.guard import GuardedOptimizer, wrap
from nanscan.manager import CheckpointManager, Restored
from nanscan.origin import Origin, find_origin, trace
from nanscan.pickling import PickleProblem, find_unpicklable
from nanscan.pickling.transient import TransientState
from nanscan.preflight_checks import Finding, preflight
from nanscan.ranges import OutOfRange, RangeRow, Watch, watch
from nanscan.recovery import Recovery
from nanscan.report import Report, StepReport, TensorReport
from nanscan.scan import scan

__all__ = [
    "BadBatch",
    "BatchProblem",
    "BatchSpec",
    "CheckedLoader",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointSystemError",
    "CheckpointWarning",
    "CorruptCheckpoint",
    "EngineError",
    "Finding",
    "FieldSpec",
    "GuardedOptimizer",
    "NonFiniteError",
    "NonFiniteWarning",
    "Origin",
    "OutOfRange",
    "PickleProblem",
    "RangeRow",
    "Recovery",
    "Report",
    "Restored",
    "StepReport",
    "TensorReport",
    "TrainingDiverged",
    "TransientState",
    "Watch",
    "__version__",
    "check_batch",
    "clip_grad_norm_",
    "engine_info",
    "find_origin",
    "find_unpicklable",
    "load",
    "preflight",
    "save",
    "scan",
    "trace",
    "watch",
    "wrap",
]
