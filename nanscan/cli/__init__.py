"""The command line: the verbs of `nanscan`, each in a module of its own."""

from nanscan.cli.app import main

__all__ = ["main"]
