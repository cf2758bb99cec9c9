"""The version, read by ``pyproject.toml`` and by ``nanscan.__version__``."""

__version__ = "0.1.0"
