"""The exceptions and the warning category of nanscan. A leaf: imports nothing of the package at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanscan.report import Report

__all__ = ["EngineError", "NonFiniteError", "NonFiniteWarning", "TrainingDiverged"]


class NonFiniteError(RuntimeError):
    """A NaN or Inf was found and the caller asked for an exception.

    Args:
        message: what was found, where, and what to do about it.
        report: the `nanscan.Report` (for a training step a `nanscan.StepReport`) that the decision was made on.

    Attributes:
        report: as given; pickling and copying the exception keep it.

    >>> error = NonFiniteError("grad of 'fc.bias' has 1 NaN, 0 Inf of 10 (first at [3])")
    >>> str(error), error.report
    ("grad of 'fc.bias' has 1 NaN, 0 Inf of 10 (first at [3])", None)
    """

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.report)


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


class NonFiniteWarning(RuntimeWarning):
    """The category of every warning about NaN and Inf, so that one filter reaches them all.

    >>> import warnings
    >>> warnings.simplefilter("error", NonFiniteWarning)   # a skipped step now stops the run
    >>> warnings.simplefilter("default", NonFiniteWarning)
    """
