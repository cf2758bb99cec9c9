"""Loading state into a model or an optimizer that was wrapped, reordered or changed, by name."""

from nanscan.matching.model import load_model_state
from nanscan.matching.optimizer import load_optimizer_state, optimizer_names
from nanscan.matching.report import MatchReport, Mismatch

__all__ = ["MatchReport", "Mismatch", "load_model_state", "load_optimizer_state", "optimizer_names"]
