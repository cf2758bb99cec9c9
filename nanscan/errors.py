"""The exceptions and the warning category of nanscan. A leaf: imports nothing of the package at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanscan.report import Report

__all__ = [
    "CheckpointError",
    "CheckpointSystemError",
    "CheckpointWarning",
    "CorruptCheckpoint",
    "EngineError",
    "NonFiniteError",
    "NonFiniteWarning",
    "TrainingDiverged",
]


class NonFiniteError(RuntimeError):
    """A NaN or Inf was found and the caller asked for an exception.

    Args:
        message: what was found, where, and what to do about it.
        report: the `nanscan.Report` (for a training step a `nanscan.StepReport`) that the decision was made on.

    Attributes:
        report: as given; pickling and copying the exception keep it.
        origin: where the NaN or Inf was made (a `nanscan.Origin`), if that was looked for; else None.

    >>> error = NonFiniteError("grad of 'fc.bias' has 1 NaN, 0 Inf of 10 (first at [3])")
    >>> str(error), error.report
    ("grad of 'fc.bias' has 1 NaN, 0 Inf of 10 (first at [3])", None)
    """

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report
        self.origin: Any = getattr(report, "origin", None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.report), {"origin": self.origin}


class TrainingDiverged(NonFiniteError):
    """`max_consecutive_skips` steps in a row were skipped: the run does not recover by itself.

    Raised by the skip that makes `optimizer.consecutive_skips` equal `max_consecutive_skips`; `.report` is the
    report of that step. Weights and optimizer state are those from before the first skipped step of the run.

    >>> issubclass(TrainingDiverged, NonFiniteError)
    True
    """


class EngineError(RuntimeError):
    """The engine that was asked for explicitly cannot run here.

    The message holds the cause, the command that mends it, and the variable (`NANSCAN_ENGINE`) that chooses
    another engine. It is never raised when the engine was left to be chosen.

    >>> issubclass(EngineError, RuntimeError)
    True
    """


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, loaded or matched; the message says what, where and what to do.

    A failed save leaves the file that was there before as it was, and nothing half-written beside it. Where the
    system said no (full disk, missing permission …) it is a `CheckpointSystemError`, which is an `OSError` too.

    >>> issubclass(CorruptCheckpoint, CheckpointError), issubclass(CheckpointSystemError, OSError)
    (True, True)
    """


class CheckpointSystemError(OSError, CheckpointError):
    """The system refused to write or read a checkpoint: an `OSError` with its `errno`, `strerror` and `filename`.

    Args:
        errno: the system's number, such as `errno.ENOSPC`.
        message: what was being done, where, why it failed, and what to do.
        filename: the path.

    >>> import errno
    >>> error = CheckpointSystemError(errno.ENOSPC, "cannot save 'last.pt': no space left on device", "last.pt")
    >>> error.errno == errno.ENOSPC, error.filename, str(error)
    (True, 'last.pt', "cannot save 'last.pt': no space left on device")
    """

    def __str__(self) -> str:
        return str(self.strerror)


class CorruptCheckpoint(CheckpointError):
    """A file is no checkpoint, or not the one that was saved: torn, truncated, with changed bytes, or foreign.

    >>> import nanscan, pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "torn.pt")
    >>> _ = path.write_bytes(b"PK")
    >>> try:
    ...     nanscan.load(path)
    ... except CorruptCheckpoint as error:
    ...     print("torn.pt" in str(error))
    True
    """


class CheckpointWarning(UserWarning):
    """The category of every warning about what a checkpoint does not hold, or what of it was not used.

    >>> import warnings
    >>> warnings.filterwarnings("ignore", category=CheckpointWarning)
    """


class NonFiniteWarning(RuntimeWarning):
    """The category of every warning about NaN and Inf, so that one filter reaches them all.

    >>> import warnings
    >>> warnings.simplefilter("error", NonFiniteWarning)   # a skipped step now stops the run
    >>> warnings.simplefilter("default", NonFiniteWarning)
    """
