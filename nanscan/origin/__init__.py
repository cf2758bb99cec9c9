"""Where a NaN or Inf was made: the op, its module, the user's line, and what it means."""

from nanscan.origin.record import OpEvent, Origin, TensorRange
from nanscan.origin.replay import find_origin
from nanscan.origin.trace import Trace, trace

__all__ = ["OpEvent", "Origin", "TensorRange", "Trace", "find_origin", "trace"]
