"""The command line: `nanscan demo`, `nanscan env`, `nanscan scan`, `nanscan bench`."""

from nanscan.cli.app import main

__all__ = ["main"]
