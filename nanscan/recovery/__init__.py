"""Back to the last good moment when training diverges: `nanscan.Recovery`."""

from nanscan.recovery.record import Rollback
from nanscan.recovery.recovery import Recovery

__all__ = ["Recovery", "Rollback"]
