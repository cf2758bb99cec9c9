"""nanscan keeps training runs numerically healthy: one fused pass over the gradients says what is wrong and where."""

from nanscan._version import __version__

__all__ = ["__version__"]
