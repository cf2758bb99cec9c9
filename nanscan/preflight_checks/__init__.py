"""What is wrong with a run before it starts: weights, parameters, settings, the first step, the batch, checkpoints."""

from nanscan.preflight_checks.check import preflight
from nanscan.preflight_checks.finding import Finding, Findings

__all__ = ["Finding", "Findings", "preflight"]
